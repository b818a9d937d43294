"""Two tenant gateways in memory, and frames of tenants."""

from __future__ import annotations

import struct
from typing import Any

from isthmus.wan.roce import RocePacket, build
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.packets.vxlan_header import IPV4_BYTES, UDP_BYTES
from isthmus.wan.tenancy.tenant_events import (
    DatagramFromGateway,
    FlowKey,
    FlowRule,
    FrameFromTenant,
    InstallRule,
    RemoveRule,
    SendByTcp,
    SendToGateway,
    SendToTenant,
    TcpBytes,
    TcpChanged,
    TcpResends,
    TenantEvent,
    Tick,
)
from isthmus.wan.tenancy.tenant_gateway import TenantGateway
from isthmus.wan.tenancy.tenants_file import TenantsFile

SITES = ("nanjing", "hangzhou")
ADDRESSES = {"nanjing": "10.0.0.1", "hangzhou": "10.0.0.2"}
MACS = b"\2\0\0\0\0\2\2\0\0\0\0\1"


def tenant(number: int, **fields: Any) -> dict[str, Any]:
    """Return a tenant; all have the same addresses."""
    return {
        "name": f"t{number}",
        "vni": 5000 + number,
        "vlan": 100 + number,
        "gbps": 0.0002,
        "networks": {"nanjing": ["10.1.0.0/16", "fd00:1::/64"], "hangzhou": ["10.2.0.0/16", "fd00:2::/64"]},
        "allow": [
            {"protocol": "udp", "to_ports": 4791},
            {"protocol": "tcp", "to_ports": "29500-29600"},
            {"protocol": "icmp"},
        ],
        **fields,
    }


def tenants_file(site: str = "nanjing", tenants: Any = None, **fields: Any) -> TenantsFile:
    """Return a file with two tenants."""
    given = [tenant(1), tenant(2)] if tenants is None else tenants
    return TenantsFile.model_validate({"site": site, "gateways": ADDRESSES, "gbps": 1, "tenants": given, **fields})


def roce_frame(
    source: str = "10.1.0.1", target: str = "10.2.0.1", *, psn: int = 0, ecn: int = 2, size: int = 64, opcode: int = 4
) -> bytes:
    """Return an Ethernet frame with a RoCEv2 packet."""
    packet = RocePacket(
        source=source, target=target, opcode=opcode, queue_pair=7, psn=psn, traffic_class=ecn, payload=bytes(size)
    )
    return MACS + (b"\x86\xdd" if ":" in source else b"\x08\0") + build(packet)


def ip_frame(source: str, target: str, protocol: int, source_port: int, target_port: int) -> bytes:
    """Return an Ethernet frame with an IPv4 packet of TCP, UDP or ICMP, of 40 bytes; checksums of payloads are zero."""
    ends = bytes(map(int, source.split("."))) + bytes(map(int, target.split(".")))
    header = bytearray(struct.pack("!BBHHHBBH8s", 0x45, 0, 40, 0, 0x4000, 64, protocol, 0, ends))
    total = sum(struct.unpack("!10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    header[10:12] = ((~total) & 0xFFFF).to_bytes(2, "big")
    return MACS + b"\x08\0" + bytes(header) + struct.pack("!HHHH12x", source_port, target_port, 20, 0)


def arp_frame(source: str, target: str) -> bytes:
    """Return a question for the address `target`."""
    ends = [bytes(map(int, one.split("."))) for one in (source, target)]
    return b"\xff" * 6 + MACS[6:] + b"\x08\x06" + b"\0\1\x08\0\6\4\0\1" + MACS[6:] + ends[0] + bytes(6) + ends[1]


class TwoGateways:
    """Both gateways; what one sends reaches the other at once, except where `lose` says so."""

    def __init__(self, **fields: Any) -> None:
        self.gateways = {site: TenantGateway(tenants_file(site, **fields), 1 + SITES.index(site)) for site in SITES}
        self.handed: list[tuple[str, int, bytes]] = []
        self.rules: dict[str, dict[FlowKey, FlowRule]] = {site: {} for site in SITES}
        self.sent: list[SendToGateway] = []
        self.num_tcp = 0
        self.now_s = 0.0
        self.mark = self.lose_every = self.num_data = self.num_tcp_bytes = self.num_resent = self.psn = 0
        self.tcp_waits: list[tuple[str, bytes]] | None = None

    def give(self, site: str, event: TenantEvent) -> None:
        """Let a gateway handle an event, and carry out everything that follows."""
        for one in self.gateways[site].handle(event, self.now_s):
            self._carry_out(site, one)

    def _carry_out(self, site: str, one: object) -> None:
        other = SITES[1 - SITES.index(site)]
        if isinstance(one, SendToTenant):
            self.handed.append((site, one.vlan, bytes(one.frame)))
        elif isinstance(one, SendByTcp):
            self.num_tcp += 1
            if self.tcp_waits is None:
                self.give(other, TcpBytes(site, one.data))
            else:
                self.tcp_waits.append((other, one.data))
        elif isinstance(one, InstallRule):
            self.rules[site][one.rule.key] = one.rule
        elif isinstance(one, RemoveRule):
            assert self.rules[site].pop(one.rule.key) == one.rule
        elif isinstance(one, SendToGateway):
            self._pass_on(site, other, one)

    def _pass_on(self, site: str, other: str, one: SendToGateway) -> None:
        packet = bytes(one.packet)
        traffic_class = packet[1]
        if one.vni != 1:
            self.sent.append(SendToGateway(one.gateway, one.vni, packet))
            self.num_data += 1
            if self.lose_every and self.num_data % self.lose_every == 0:
                return
            if self.mark and traffic_class & 3:
                traffic_class |= 3
        address = packet[12:16]
        assert address == self.gateways[site].file.gateways[site].packed
        buffer = FrameBuffer(packet[IPV4_BYTES + UDP_BYTES :])
        self.give(other, DatagramFromGateway(address, traffic_class, buffer))

    def release_tcp(self) -> None:
        """Let what waits in TCP arrive."""
        waits, self.tcp_waits = self.tcp_waits or [], None
        for other, data in waits:
            self.give(other, TcpBytes(SITES[1 - SITES.index(other)], data))

    def connect_tcp(self, is_up: bool = True) -> None:
        """Begin or end the TCP connection."""
        for site in SITES:
            self.give(site, TcpChanged(SITES[1 - SITES.index(site)], is_up))

    def send(self, site: str, frame: bytes, vlan: int = 101) -> list[tuple[str, int, bytes]]:
        """Send a tenant's frame; return what was handed to tenants."""
        before = len(self.handed)
        self.give(site, FrameFromTenant(vlan, FrameBuffer(frame)))
        return self.handed[before:]

    def pass_time(self, seconds: float, frames_each: int = 0) -> None:
        """Pass time in heartbeats; nanjing's first tenant sends so many RoCEv2 frames in each."""
        for _ in range(round(seconds / 0.1)):
            self.now_s += 0.1
            for _ in range(frames_each):
                self.psn += 1
                self.send("nanjing", roce_frame(psn=self.psn))
            self.num_tcp_bytes += 100_000
            self.num_resent += 5_000 if self.lose_every else 0
            for site in SITES:
                self.give(site, TcpResends(SITES[1 - SITES.index(site)], self.num_tcp_bytes, self.num_resent))
                self.give(site, Tick())

    def dropped(self, site: str) -> dict[str, int]:
        """Return what a gateway has dropped, by reason."""
        return dict(self.gateways[site].statistics(self.now_s).dropped)
