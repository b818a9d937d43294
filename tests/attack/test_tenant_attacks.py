"""Hostile tenants and networks at a tenant gateway: no other tenant is reached, memory is bounded, it goes on."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.packets.gateway_heartbeat import GatewayHeartbeat, build_heartbeat
from isthmus.wan.tenancy.tenant_events import (
    DatagramFromGateway,
    EndTcp,
    FrameFromTenant,
    FrameFromTunnel,
    SendToGateway,
    SendToTenant,
    TcpBytes,
    TcpChanged,
    TenantInstruction,
    Tick,
)
from isthmus.wan.tenancy.tenant_gateway import TenantGateway
from isthmus.wan.tenancy.tenant_table import MAX_REMEMBERED
from tests.wan.tenancy.tenancy_lab import arp_frame, ip_frame, roce_frame, tenant, tenants_file

pytestmark = pytest.mark.attack

FAR = b"\x0a\0\0\2"
GOOD = roce_frame("10.2.0.1", "10.1.0.1")


def vxlan(frame: bytes, vni: int = 5001) -> bytes:
    """Return a frame under a VXLAN header."""
    return b"\x08\0\0\0" + (vni << 8).to_bytes(4, "big") + frame


def handed(out: list[TenantInstruction]) -> list[SendToTenant]:
    """Return what goes to tenants."""
    return [one for one in out if isinstance(one, SendToTenant)]


@st.composite
def spoilt(draw: st.DrawFn, good: bytes) -> bytes:
    """Return a frame of which bytes are replaced, cut off, or added."""
    data = bytearray(good)
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=6)):
        data[place] = byte
    return bytes(data[: draw(st.integers(0, len(data)))]) + draw(st.binary(max_size=30))


@given(data=spoilt(vxlan(GOOD)), gateway=st.sampled_from([FAR, b"\x0a\0\0\7"]), traffic_class=st.integers(0, 255))
def test_spoilt_packets_of_the_network_reach_no_other_tenant(data: bytes, gateway: bytes, traffic_class: int) -> None:
    """What is handed over is for the VLAN of the packet's own VNI, from a known gateway, as long as it came."""
    gateway_of_site = TenantGateway(tenants_file(), 1)
    out = handed(gateway_of_site.handle(DatagramFromGateway(gateway, traffic_class, FrameBuffer(data)), 0.0))
    for one in out:
        assert gateway == FAR
        assert one.vlan == int.from_bytes(data[4:7], "big") - 4900
        assert len(one.frame) == len(data) - 8


@given(data=spoilt(roce_frame()) | spoilt(arp_frame("10.1.0.1", "10.2.0.1")), vlan=st.integers(-1, 5000))
def test_spoilt_frames_of_tenants_leave_under_their_own_vni(data: bytes, vlan: int) -> None:
    """To the gateways of the file only; a tenant cannot write what stands before its frame."""
    gateway = TenantGateway(tenants_file(), 1)
    for one in gateway.handle(FrameFromTenant(vlan, FrameBuffer(data)), 0.0):
        if isinstance(one, SendToGateway) and one.vni != 1:
            packet = bytes(one.packet)
            assert (one.gateway, packet[12:20]) == (FAR, b"\x0a\0\0\1" + FAR)
            assert int.from_bytes(packet[32:35], "big") == one.vni == vlan + 4900
            assert packet[36:] == data


def test_a_tenant_cannot_speak_as_a_gateway() -> None:
    """A heartbeat from a tenant's VLAN, or in the TCP connection, is no heartbeat: control traffic has its own VNI."""
    gateway = TenantGateway(tenants_file(), 1)
    beat = bytes(build_heartbeat(GatewayHeartbeat(epoch=9, number=1, sent_us=1)).view)
    gateway.handle(FrameFromTenant(101, FrameBuffer(beat)), 0.0)
    gateway.handle(FrameFromTunnel(5001, FAR, FrameBuffer(beat)), 0.0)
    gateway.handle(TcpChanged("hangzhou", True), 0.0)
    head = (1 << 24 | 1).to_bytes(4, "big") + (1).to_bytes(4, "big") + len(beat).to_bytes(4, "big")
    gateway.handle(TcpBytes("hangzhou", head + beat), 0.0)
    assert not gateway.statistics(0.0).links[0].is_up
    assert gateway.statistics(0.0).dropped == {"malformed": 2, "unknown VNI": 1}


def test_a_flood_of_flows_and_addresses_costs_bounded_memory() -> None:
    """A tenant has as many flows as its file says, and takes none of another's; what is remembered is bounded."""
    file = tenants_file(tenants=[tenant(1, max_flows=100), tenant(2, max_flows=100)])
    gateway, rng = TenantGateway(file, 1), Random(1)
    for _ in range(3_000):
        source = f"10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(0, 255)}"
        frame = ip_frame(source, "10.2.0.1", 6, rng.randint(1, 65535), 29500)
        gateway.handle(FrameFromTenant(101, FrameBuffer(frame)), 0.0)
    assert gateway.statistics(0.0).flows <= 100
    assert all(len(one._sites) <= MAX_REMEMBERED for one in gateway._table.by_vlan.values())
    out = gateway.handle(FrameFromTenant(102, FrameBuffer(roce_frame())), 0.0)
    assert any(isinstance(one, SendToGateway) and one.vni == 5002 for one in out)


@given(data=st.binary(min_size=12, max_size=200))
def test_random_bytes_end_the_connection_or_wait(data: bytes) -> None:
    """A connection that brings no frames is ended; nothing is handed over, and the gateway goes on."""
    gateway = TenantGateway(tenants_file(), 1)
    gateway.handle(TcpChanged("hangzhou", True), 0.0)
    out = gateway.handle(TcpBytes("hangzhou", data), 0.0)
    assert not handed(out)
    assert data[0] in (1, 2) or any(isinstance(one, EndTcp) for one in out)
    assert len(handed(gateway.handle(DatagramFromGateway(FAR, 0, FrameBuffer(vxlan(GOOD))), 0.0))) == 1


@given(seed=st.integers(0, 2**40))
def test_false_heartbeats_never_hold_a_flow_up(seed: int) -> None:
    """Whatever another gateway says of counts, epochs and times, frames of tenants are still sent or go by TCP."""
    gateway, rng = TenantGateway(tenants_file(), 1), Random(seed)
    for step in range(60):
        beat = GatewayHeartbeat(
            epoch=rng.choice([7, 8, 2**32 - 1]), number=rng.randint(0, 2**32 - 1), sent_us=rng.getrandbits(64),
            echo_epoch=rng.choice([0, 1, 2]), echo_number=rng.randint(0, 60), echo_sent_us=rng.getrandbits(40),
            held_us=rng.getrandbits(32), num_heard=rng.getrandbits(rng.choice([8, 64])), num_marked=rng.getrandbits(64),
        )  # fmt: skip
        data = vxlan(bytes(build_heartbeat(beat).view), 1)
        gateway.handle(DatagramFromGateway(FAR, 0, FrameBuffer(data)), step * 0.1)
        gateway.handle(Tick(), step * 0.1)
        out = gateway.handle(FrameFromTenant(101, FrameBuffer(roce_frame(psn=step))), step * 0.1)
        assert any(isinstance(one, SendToGateway) and one.vni == 5001 for one in out)
        quality = gateway.statistics(step * 0.1).links[0].quality
        assert 0 <= quality.lost_share <= 1
        assert 0 <= quality.marked_share <= 1
