"""Packets of tenant gateways: VXLAN as scapy makes it, marks as RFC 6040 says, and nothing else parses."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.wan.tenancy.packets.ecn_marks import merged_ecn, set_ecn
from isthmus.wan.tenancy.packets.frame_buffer import FrameBuffer
from isthmus.wan.tenancy.packets.gateway_heartbeat import GatewayHeartbeat, build_heartbeat, parse_heartbeat
from isthmus.wan.tenancy.packets.inner_frame import view_inner
from isthmus.wan.tenancy.packets.tcp_frames import TcpEntry, TcpFrames, pack_tcp_ack, pack_tcp_frame
from isthmus.wan.tenancy.packets.vxlan_header import pull_vxlan, push_outer, push_vxlan
from isthmus.wan.tenancy.tcp_side import MAX_UNACKNOWLEDGED_BYTES, TcpSide
from tests.wan.tenancy.tenancy_lab import ip_frame, roce_frame

ENDS = b"\x0a\0\0\1", b"\x0a\0\0\2"


@given(frame=st.binary(max_size=300), vni=st.integers(0, 2**24 - 1))
def test_a_frame_comes_out_of_its_header_as_it_went_in(frame: bytes, vni: int) -> None:
    """In place: the buffer stays the same one, and so does the frame in it."""
    buffer = FrameBuffer(frame)
    data, start = buffer.data, buffer.start
    push_vxlan(buffer, vni)
    assert pull_vxlan(buffer) == vni
    assert buffer.data is data
    assert (buffer.start, bytes(buffer.view)) == (start, frame)


def test_packets_are_those_of_scapy(pytestconfig: pytest.Config) -> None:
    """The same fields make the same bytes from the outer IPv4 header to the frame's end; scapy's are parsed."""
    pytest.importorskip("scapy.layers.vxlan", reason="needs scapy: pip install '.[dev]'")
    from scapy.layers.inet import IP, UDP
    from scapy.layers.vxlan import VXLAN
    from scapy.packet import Raw

    rng = Random(20)
    for number in range(20_000 if pytestconfig.getoption("--whole") else 300):
        vni, traffic_class, frame = rng.getrandbits(24), rng.getrandbits(8), rng.randbytes(rng.randint(14, 1500))
        source, target = rng.randbytes(4), rng.randbytes(4)
        buffer = FrameBuffer(frame)
        push_vxlan(buffer, vni)
        push_outer(buffer, source, target, traffic_class, number.to_bytes(4, "big"))
        found = bytes(buffer.view)
        port = int.from_bytes(found[20:22], "big")
        addresses = [".".join(map(str, one)) for one in (source, target)]
        outer = IP(src=addresses[0], dst=addresses[1], tos=traffic_class, id=0, flags="DF", ttl=64)
        inner = bytes(UDP(sport=port, dport=4789, chksum=0) / VXLAN(vni=vni, flags="Instance") / Raw(frame))
        outer.proto = 17
        assert found == bytes(outer / Raw(inner))
        assert 49152 <= port < 65536
        payload = FrameBuffer(inner[8:])
        assert pull_vxlan(payload) == vni
        assert bytes(payload.view) == frame


def test_a_flow_keeps_its_source_port_and_flows_use_many() -> None:
    """Networks that balance by ports carry a flow on one path, and many flows on all."""

    def port(entropy: bytes) -> bytes:
        buffer = FrameBuffer()
        push_outer(buffer, *ENDS, 0, entropy)
        return bytes(buffer.view[20:22])

    assert port(b"a") == port(b"a")
    assert len({port(n.to_bytes(2, "big")) for n in range(200)}) > 190


@pytest.mark.parametrize("head", ["0800000000138800", "0c00000000138800", "0000000000138800", "0800000100138800"])
def test_only_plain_vxlan_is_taken(head: str) -> None:
    """A header without the flag of a VNI, or with bits of an extension, is refused."""
    buffer = FrameBuffer(bytes.fromhex(head))
    if head.startswith("08000000"):
        assert pull_vxlan(buffer) == 5000
    else:
        with pytest.raises(ProtocolError, match="not plain VXLAN"):
            pull_vxlan(buffer)


def test_marks_merge_as_in_the_figure_of_rfc_6040() -> None:
    """Rows are inner marks, columns outer ones: not-ECT, ECT(0), ECT(1), CE."""
    order = (0, 2, 1, 3)
    table = [[merged_ecn(inner, outer) for outer in order] for inner in order]
    assert table == [[0, 0, 0, None], [2, 2, 1, 3], [1, 1, 1, 3], [3, 3, 3, 3]]


@given(mark=st.integers(0, 3), before=st.integers(0, 3), six=st.booleans(), psn=st.integers(0, 2**24 - 1))
def test_a_mark_changes_nothing_else(mark: int, before: int, six: bool, psn: int) -> None:
    """The frame is that of a NIC that had set the mark itself: its checksum and its ICRC hold."""
    ends = ("fd00:1::1", "fd00:2::1") if six else ("10.1.0.1", "10.2.0.1")
    data = bytearray(roce_frame(*ends, ecn=before, psn=psn))
    set_ecn(data, 14, mark)
    assert bytes(data) == roce_frame(*ends, ecn=mark, psn=psn)


def test_rocev2_is_recognised_by_port_and_opcode() -> None:
    """UDP 4791 without a transport header that exists is not RoCEv2; a notification is."""
    assert view_inner(FrameBuffer(roce_frame())).is_roce
    assert view_inner(FrameBuffer(roce_frame("fd00:1::1", "fd00:2::1"))).is_roce
    assert not view_inner(FrameBuffer(roce_frame(opcode=0x7E))).is_roce
    assert not view_inner(FrameBuffer(ip_frame("10.1.0.1", "10.2.0.1", 17, 4791, 53))).is_roce
    found = view_inner(FrameBuffer(roce_frame(opcode=0x81)))
    assert (found.is_roce, found.is_notification) == (True, True)


@given(data=st.binary(max_size=120), place=st.integers(0, 70), byte=st.integers(0, 255), cut=st.integers(0, 120))
def test_any_frame_is_viewed_or_refused(data: bytes, place: int, byte: int, cut: int) -> None:
    """Random and changed frames never lead beyond their end; nothing but `ProtocolError` comes."""
    changed = bytearray(roce_frame())
    changed[min(place, len(changed) - 1)] = byte
    for frame in (data, bytes(changed[:cut]), b"\0" * 12 + b"\x08\0" + data, b"\0" * 12 + b"\x86\xdd" + data):
        try:
            view = view_inner(FrameBuffer(frame))
        except ProtocolError:
            continue
        assert len(view.source) == len(view.target)
        assert view.base + 12 <= 64 + len(frame)


@given(data=st.binary(max_size=100))
def test_any_control_frame_is_a_heartbeat_or_refused(data: bytes) -> None:
    """Heartbeats are read as they were built; other bytes are refused."""
    beat = GatewayHeartbeat(
        epoch=5, number=2, sent_us=3, echo_epoch=4, echo_number=1, echo_sent_us=9, held_us=1, num_heard=7, num_marked=6
    )
    frame = bytes(build_heartbeat(beat).view)
    assert parse_heartbeat(frame) == beat
    for one in (data, frame[:14] + data, frame[: len(data)]):
        if one != frame:
            with pytest.raises(ProtocolError):
                parse_heartbeat(one)


@given(frames=st.lists(st.binary(max_size=50), max_size=8), cuts=st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_frames_in_tcp_come_whole_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    """The connection's pieces need not be entries."""
    data = b"".join(pack_tcp_frame(5001, n, frame) for n, frame in enumerate(frames)) + pack_tcp_ack(9)
    reader, found = TcpFrames(), list[TcpEntry]()
    for cut in cuts * len(data):
        found += reader.take(data[:cut])
        data = data[cut:]
    assert found == [TcpEntry(n, 5001, frame) for n, frame in enumerate(frames)] + [TcpEntry(9, 0, None)]


@given(data=st.binary(min_size=12, max_size=60))
def test_any_bytes_in_tcp_are_frames_or_refused(data: bytes) -> None:
    """No announced length leads to more than a frame that is kept."""
    reader = TcpFrames()
    try:
        for _ in range(5):
            for entry in reader.take(data):
                assert entry.frame is None or len(entry.frame) < 10_000
    except ProtocolError:
        pass


def test_what_tcp_keeps_is_bounded_and_false_acknowledgements_change_nothing() -> None:
    """A far side that acknowledges nothing, or what was never sent, gets no more than the bound."""
    side = TcpSide()
    side.change(is_up=True)
    frame = bytes(9000)
    num_packed = 0
    while side.pack(5001, frame) is not None:
        num_packed += 1
    assert num_packed == MAX_UNACKNOWLEDGED_BYTES // 9000
    side.take(pack_tcp_ack(num_packed + 5))
    assert side.acknowledged == 0
    side.take(pack_tcp_ack(num_packed))
    assert (side.acknowledged, side.unacknowledged_bytes) == (num_packed, 0)
