"""RoCEv2 packets: bytes as scapy's layer makes them, whole round trips, and nothing else parses."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce import RocePacket, build, icrc, parse
from isthmus.wan.roce.roce_opcodes import EXTRA_BYTES, HAS_AETH, HAS_RETH, Opcode, psn_distance
from isthmus.wan.roce.roce_packet import AethHeader, RethHeader

KNOWN = bytes.fromhex(
    "4500003c000140004011255a0a0000010a000002c00012b700280000040000ff0000001280000007"
)  # without payload and ICRC
"""A SEND_ONLY from 10.0.0.1 to 10.0.0.2 by hand from the specification's tables, up to its base transport header."""


def some_packet(rng: Random, *, six: bool) -> RocePacket:
    """Return any packet that a NIC may send."""
    opcode = rng.choice([*Opcode])
    word = rng.getrandbits
    payload = rng.randbytes(rng.choice((0, 1, 3, 64, 1024)))
    return RocePacket(
        source=f"2001:db8::{word(16) | 1:x}" if six else f"10.1.{word(8)}.{word(8)}",
        target=f"2001:db8:1::{word(16) | 1:x}" if six else f"10.2.{word(8)}.{word(8)}",
        opcode=opcode,
        queue_pair=word(24),
        psn=word(24),
        source_port=0xC000 | word(14),
        traffic_class=word(8),
        hop_limit=rng.randint(1, 255),
        identification=0 if six else word(16),
        dont_fragment=True if six else bool(word(1)),
        flow_label=word(20) if six else 0,
        udp_checksum=word(16),
        is_solicited=bool(word(1)),
        migration=bool(word(1)),
        partition=word(16),
        is_marked=bool(word(1)),
        reserved_bits=word(1) << 6,
        wants_ack=bool(word(1)),
        reth=RethHeader(word(64), word(32), word(32)) if opcode in HAS_RETH else None,
        aeth=AethHeader(word(8), word(24)) if opcode in HAS_AETH else None,
        extra=rng.randbytes(EXTRA_BYTES.get(opcode, 0)),
        payload=payload,
        padding=bytes(-len(payload) % 4),
    )


@given(seed=st.integers(0, 2**40), six=st.booleans())
def test_a_packet_is_parsed_as_it_was_built(*, seed: int, six: bool) -> None:
    """Every field survives, and the bytes of a packet that is parsed and built are the same."""
    packet = some_packet(Random(seed), six=six)
    frame = build(packet)
    assert parse(frame) == packet
    assert build(parse(frame)) == frame


def scapy_frame(packet: RocePacket) -> bytes:
    """Return what scapy's roce layer builds for the same fields."""
    from scapy.contrib.roce import AETH, BTH
    from scapy.layers.inet import IP, UDP
    from scapy.layers.inet6 import IPv6
    from scapy.packet import Raw

    address: Any = (
        IPv6(src=packet.source, dst=packet.target, tc=packet.traffic_class, fl=packet.flow_label, hlim=packet.hop_limit)
        if ":" in packet.source
        else IP(
            src=packet.source, dst=packet.target, tos=packet.traffic_class, id=packet.identification,
            flags="DF" if packet.dont_fragment else 0, ttl=packet.hop_limit,
        )
    )  # fmt: skip
    base = BTH(
        opcode=packet.opcode, solicited=packet.is_solicited, migreq=packet.migration, padcount=len(packet.padding),
        version=packet.version, pkey=packet.partition, fecn=packet.is_marked, becn=packet.reserved_bits >> 6,
        dqpn=packet.queue_pair, ackreq=packet.wants_ack, psn=packet.psn,
    )  # fmt: skip
    found = address / UDP(sport=packet.source_port, dport=4791, chksum=packet.udp_checksum) / base
    rest = b""
    if packet.reth is not None:
        rest += packet.reth.address.to_bytes(8) + packet.reth.key.to_bytes(4) + packet.reth.num_bytes.to_bytes(4)
    if packet.aeth is not None and packet.opcode == Opcode.ACKNOWLEDGE:
        found = found / AETH(syndrome=packet.aeth.syndrome, msn=packet.aeth.message)
    elif packet.aeth is not None:
        rest += bytes([packet.aeth.syndrome]) + packet.aeth.message.to_bytes(3)
    rest += packet.extra + packet.payload + packet.padding
    return bytes(found / Raw(rest)) if rest else bytes(found)


@pytest.mark.parametrize("six", [False, True])
def test_frames_are_those_of_scapys_layer(pytestconfig: pytest.Config, *, six: bool) -> None:
    """The same fields make the same bytes, ICRC included, and scapy's bytes parse."""
    pytest.importorskip("scapy.contrib.roce", reason="needs scapy: pip install '.[dev]'")
    rng = Random(20)
    for _ in range(20_000 if pytestconfig.getoption("--whole") else 200):
        packet = some_packet(rng, six=six)
        frame = scapy_frame(packet)
        assert build(packet) == frame
        assert parse(frame) == packet


def test_the_headers_stand_where_the_specification_puts_them() -> None:
    """A frame that was put together by hand from the tables is what `build` makes."""
    packet = RocePacket(
        source="10.0.0.1", target="10.0.0.2", opcode=Opcode.SEND_ONLY, queue_pair=0x12, psn=7, source_port=0xC000,
        traffic_class=0, identification=1, migration=False, partition=0xFF, wants_ack=True, payload=b"isthmus!" * 2,
    )  # fmt: skip
    frame = build(packet)
    assert frame[:40].hex() == KNOWN[:10].hex() + frame[10:12].hex() + KNOWN[12:40].hex()
    assert frame[40:56] == b"isthmus!" * 2
    assert frame[56:] == icrc(frame)


def test_the_icrc_ignores_what_routers_change() -> None:
    """Hop limit, traffic class and checksums may change on the way; a bit of anything else may not."""
    rng = Random(3)
    for six in (False, True):
        frame = build(some_packet(rng, six=six))
        changing = {1, 2, 3, 7} | {46, 47} | {52} if six else {1, 8, 10, 11} | {26, 27} | {32}
        for place in range(len(frame) - 4):
            other = bytearray(frame)
            other[place] ^= 0x01 if six and place == 0 else 0x10
            if place != 0:
                assert (icrc(bytes(other)) == icrc(frame)) == (place in changing), place


@given(st.binary(max_size=120))
def test_random_bytes_are_refused(frame: bytes) -> None:
    """No other error than `ProtocolError` leaves the parser."""
    with pytest.raises(ProtocolError):
        parse(frame)


@given(seed=st.integers(0, 2**40), six=st.booleans(), data=st.data())
def test_a_cut_or_changed_frame_is_refused(*, seed: int, data: st.DataObject, six: bool) -> None:
    """Cut anywhere it never parses; a changed byte is refused unless the ICRC leaves it out."""
    frame = build(some_packet(Random(seed), six=six))
    with pytest.raises(ProtocolError):
        parse(frame[: data.draw(st.integers(0, len(frame) - 1))])
    place = data.draw(st.integers(0, len(frame) - 1))
    other = bytearray(frame)
    other[place] ^= data.draw(st.integers(1, 255))
    try:
        found = parse(bytes(other))
    except ProtocolError:
        return
    assert build(found) == bytes(other)


def test_fields_without_room_are_refused() -> None:
    """A number beyond its bits, or a header that the opcode does not have, is an error and no other packet."""
    good = {"source": "10.0.0.1", "target": "10.0.0.2", "opcode": Opcode.SEND_ONLY, "queue_pair": 1, "psn": 1}
    bad = (
        {"psn": 2**24}, {"queue_pair": -1}, {"source": "10.0.0"}, {"target": "::1"}, {"aeth": AethHeader(0, 0)},
        {"extra": b"1234"}, {"padding": b"1234"}, {"source_port": 2**16}, {"opcode": 256}, {"version": 16},
    )  # fmt: skip
    for change in bad:
        with pytest.raises(ProtocolError):
            build(RocePacket(**(good | change)))


def test_sequence_numbers_wrap() -> None:
    """The distance of two numbers is right across 2^24."""
    assert psn_distance(2**24 - 2, 3) == 5
    assert psn_distance(3, 2**24 - 2) == -5
    assert psn_distance(7, 7) == 0
