"""The packet relay without root: socket pairs stand for the sites' devices."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.wan.packet_relay import PacketLink, PacketRelay
from isthmus.wan.tun_packet import HEADER_BYTES, KIND_UDP, measure_packet, surviving_segments
from tests.wan.lab import link_of, pool_of

A, B = "10.213.0.1", "10.213.0.2"


def packet(to: str, number: int = 0, size: int = 1500, segment_bytes: int = 0) -> bytes:
    """A packet of a device, as far as the relay looks: header, version, target, a number to know it by, TCP header."""
    head = struct.pack("=BBHHHH", 0, int(segment_bytes > 0), 40, segment_bytes, 0, 0)
    start = bytes([0x45]) + bytes(15) + socket.inet_aton(to) + number.to_bytes(4, "big") + bytes(8) + b"\x50"
    return (head + start + bytes(size))[: size + HEADER_BYTES]


def enqueue(link: PacketLink, now_s: float, data: bytes) -> None:
    found = measure_packet(data)
    assert found is not None
    link.enqueue(now_s, data, found)


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.setblocking(False)
        yield left, right


class Clock:
    """The time of a test, in seconds."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def get(self) -> float:
        return self._now_s

    def set(self, now_s: float) -> None:
        self._now_s = now_s


def test_packets_come_when_due_and_in_order(wire: tuple[socket.socket, socket.socket]) -> None:
    """Two packets of 1500 bytes at 1 Gbit/s are 12 microseconds apart, after the one-way delay."""
    link = PacketLink(link_of(delay_ms=10), link_of(delay_ms=10), Random(0), wire[0].fileno())
    enqueue(link, 1.0, packet(B, 1))
    enqueue(link, 1.0, packet(B, 2))
    link.deliver(1.010011)
    assert link.num_packets == 0
    link.deliver(1.010013)
    assert (link.num_packets, link.num_bytes) == (1, 1500)
    link.deliver(1.010025)
    assert [wire[1].recv(2000)[HEADER_BYTES + 20 : HEADER_BYTES + 24] for _ in range(2)] == [b"\0\0\0\1", b"\0\0\0\2"]


def test_segments_that_come_as_one_packet_cross_as_segments(wire: tuple[socket.socket, socket.socket]) -> None:
    """10,000 bytes of payload in segments of 1,460 are seven packets, each with its headers of 40 bytes."""
    link = PacketLink(link_of(delay_ms=10), link_of(delay_ms=10), Random(0), wire[0].fileno())
    enqueue(link, 0.0, packet(B, size=10_040, segment_bytes=1460))
    link.deliver(0.010 + 10_280 * 8e-9 - 1e-6)
    assert link.num_packets == 0
    link.deliver(0.010 + 10_280 * 8e-9 + 1e-6)
    assert (link.num_packets, link.num_bytes) == (7, 10_280)


@pytest.mark.attack
@given(st.binary(max_size=100), st.sampled_from([0, 1, 5]), st.sets(st.integers(0, 60)))
def test_no_packet_of_a_device_breaks_the_relay(rest: bytes, kind: int, lost: set[int]) -> None:
    """Any bytes are either a packet with at least one segment, of its size at least, or none; losses take some."""
    for data in (rest, bytes([0, kind, 0, 0, 1, 0, 0, 0, 0, 0, 0x45]) + rest):
        found = measure_packet(data)
        if found is not None:
            assert found.num_segments >= 1
            assert found.num_bytes >= len(data) - HEADER_BYTES
            assert len(found.target) == 4
            left = sum(piece.num_segments for _, piece in surviving_segments(data, found, lost))
            assert left == found.num_segments - len({place for place in lost if place < found.num_segments})


@given(
    st.sampled_from(["tcp", "udp"]),
    st.integers(100, 1448),
    st.binary(min_size=1, max_size=30),
    st.sets(st.integers(0, 12)),
    st.integers(0, 2**32 - 1),
)
def test_segments_that_are_left_are_those_that_a_network_card_would_have_sent(
    protocol: str, segment_bytes: int, seed: bytes, lost: set[int], number: int
) -> None:
    """Beside scapy: each run has the bytes, number, flags, lengths and sums of its segments; lost ones are missing."""
    from scapy.layers.inet import IP, TCP, UDP, in4_pseudoheader
    from scapy.utils import checksum

    payload = (seed * 16_000)[: 11 * segment_bytes + 7]
    transport = (
        TCP(sport=1, dport=2, seq=number, flags="PAFC", options=[("NOP", None)] * 4)
        if protocol == "tcp"
        else UDP(sport=1, dport=2)
    )
    whole = bytes(IP(src=A, dst=B, id=65_530) / transport / payload)
    head = struct.pack("=BBHHHH", 1, 1 if protocol == "tcp" else KIND_UDP, 0, segment_bytes, 20, 16)
    packet = measure_packet(head + whole)
    assert packet is not None
    found = {}
    for data, piece in surviving_segments(head + whole, packet, lost):
        again = IP(data[HEADER_BYTES:])
        inner = again.payload
        content = bytes(inner.payload)
        assert measure_packet(data) == piece
        assert checksum(data[HEADER_BYTES : HEADER_BYTES + 20]) == 0
        if piece != packet:
            assert inner.chksum == ~checksum(in4_pseudoheader(again.proto, again, again.len - 20)) & 0xFFFF
        assert again.len == len(data) - HEADER_BYTES
        if protocol == "tcp":
            offset = (inner.seq - number) % 2**32
            assert ("F" in inner.flags, "P" in inner.flags) == (offset + len(content) == len(payload),) * 2
            assert ("C" in inner.flags) == (offset == 0)
        else:
            offset = ((again.id - 65_530) % 2**16) * segment_bytes
            assert inner.len == 8 + len(content)
        assert (again.id - 65_530) % 2**16 == offset // segment_bytes
        for place in range(offset, offset + len(content), segment_bytes):
            found[place // segment_bytes] = content[place - offset : place - offset + segment_bytes]
    segments = {place: payload[place * segment_bytes :][:segment_bytes] for place in range(packet.num_segments)}
    assert found == {place: segment for place, segment in segments.items() if place not in lost}


def test_a_full_queue_drops_the_tail(wire: tuple[socket.socket, socket.socket]) -> None:
    """The queue holds one round trip of the rate; what comes on top is dropped and counted, not delayed."""
    link = PacketLink(link_of(bandwidth_gbps=0.12), link_of(), Random(0), wire[0].fileno())
    for number in range(1000):
        enqueue(link, 0.0, packet(B, number))
    in_round_trip = round(0.12e9 / 8 * 0.020 / 1500)
    assert len(link.in_flight) == pytest.approx(in_round_trip, abs=2)
    assert link.num_dropped == 1000 - len(link.in_flight)


def test_the_stated_share_of_packets_is_lost(wire: tuple[socket.socket, socket.socket]) -> None:
    """Loss is Bernoulli per packet, seeded, and takes its time on the wire all the same."""
    counts = []
    for seed in (1, 1, 2):
        link = PacketLink(link_of(loss=0.05), link_of(), Random(seed), wire[0].fileno())
        for number in range(20_000):
            enqueue(link, number * 1e-3, packet(B, number, 100))
        counts.append(link.num_lost)
    assert counts[0] / 20_000 == pytest.approx(0.05, rel=0.1)
    assert counts[0] == counts[1] != counts[2]


def test_a_device_that_is_down_costs_the_packet_and_not_the_relay() -> None:
    """A write that fails counts as a drop."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    right.close()
    with left:
        link = PacketLink(link_of(), link_of(), Random(0), left.fileno())
        enqueue(link, 0.0, packet(B))
        link.deliver(1.0)
    assert (link.num_packets, link.num_dropped) == (0, 1)


@pytest.mark.slow
def test_the_relay_routes_by_address_and_ends_with_its_control() -> None:
    """Packets for a joined site arrive after the delay, others vanish; a line on control gets counters."""
    now_s = Clock()
    with ExitStack() as stack:
        sites = {}
        for name in "ab":
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(near), stack.enter_context(far)
            far.setblocking(False)
            near.settimeout(10)
            sites[name] = near, far
        control, answer = os.pipe(), os.pipe()
        pool = pool_of({"between": ["a", "b"], "bandwidth_gbps": 1, "delay_ms": 20})
        relay = PacketRelay(pool, {"a": (A, sites["a"][1].fileno()), "b": (B, sites["b"][1].fileno())}, 0, now_s.get)
        thread = threading.Thread(target=relay.run, args=(control[0], answer[1]))
        thread.start()
        for data in (b"", bytes(HEADER_BYTES) + b"\x60" + bytes(40), packet("10.9.9.9"), packet(B, 7)):
            sites["a"][0].send(data)
        for time_s, num_packets in ((0.0, 0), (0.0199, 0), (0.0201, 1)):
            now_s.set(time_s)
            if num_packets:
                assert sites["b"][0].recv(2000) == packet(B, 7)
            os.write(control[1], b"counters\n")
            counters = {(x["from"], x["to"]): x["packets"] for x in json.loads(os.read(answer[0], 4096))}
            assert counters == {("a", "b"): num_packets, ("b", "a"): 0}
        os.close(control[1])
        thread.join(10)
        assert not thread.is_alive()
        for descriptor in (control[0], *answer):
            os.close(descriptor)
