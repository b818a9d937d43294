"""`measure_packet`, `surviving_segments`: what a packet of a TUN device is on the wire, and what losses leave of it.

Each packet begins with the `virtio_net_hdr` of Linux (`IFF_VNET_HDR`): flags, kind of segmentation offload, length of
the headers, payload of a segment, place of the checksum. A device with offload passes a run of TCP segments, or of UDP
datagrams that were sent together, as one packet, which its receiver takes as one too: a relay in Python then carries 1
Gbit/s in both directions on a share of a core.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

HEADER_BYTES = 10
"""Size of the header before each IP packet."""

_HEADER = struct.Struct("=BBHHHH")
KIND_UDP = 5
"""Kind of offload of UDP datagrams (VIRTIO_NET_HDR_GSO_UDP_L4); the others are TCP's."""

_IPV4_MIN_BYTES = 20
_TCP_MIN_BYTES = 20
_UDP_BYTES = 8
_ID_AT, _IP_CHECKSUM_AT, _PROTOCOL_AT, _ADDRESSES = 4, 10, 9, slice(12, 20)
_TCP_FLAGS_AT, _TCP_CHECKSUM_AT, _UDP_CHECKSUM_AT = 13, 16, 6
_FIN_PUSH, _CONGESTION_WINDOW_REDUCED = 0x01 | 0x08, 0x80


class WirePacket(NamedTuple):
    """An IPv4 packet: where it goes, and what crosses the wire."""

    target: bytes
    """The four bytes of the address."""
    num_segments: int
    """Packets on the wire."""
    num_bytes: int
    """Their bytes, with the headers of each."""


def measure_packet(data: bytes) -> WirePacket | None:
    """Return what `data`, a header and an IP packet, is on the wire; None for other than whole IPv4."""
    num_bytes = len(data) - HEADER_BYTES
    if num_bytes < _IPV4_MIN_BYTES or data[HEADER_BYTES] >> 4 != 4:
        return None
    target = data[HEADER_BYTES + 16 : HEADER_BYTES + 20]
    _, kind, _, segment_bytes, _, _ = _HEADER.unpack_from(data)
    if not kind:
        return WirePacket(target, 1, num_bytes)
    ip_bytes = (data[HEADER_BYTES] & 15) * 4
    least_bytes = ip_bytes + (_UDP_BYTES if kind == KIND_UDP else _TCP_MIN_BYTES)
    if not segment_bytes or ip_bytes < _IPV4_MIN_BYTES or num_bytes < least_bytes:
        return None
    repeated_bytes = _headers_bytes(data)
    if not least_bytes <= repeated_bytes <= num_bytes:
        return None
    num_segments = max(-(-(num_bytes - repeated_bytes) // segment_bytes), 1)
    return WirePacket(target, num_segments, num_bytes + (num_segments - 1) * repeated_bytes)


def _headers_bytes(data: bytes) -> int:
    """Return the size of the IP and transport headers of a packet of several segments, which each segment has."""
    ip_bytes = (data[HEADER_BYTES] & 15) * 4
    if _HEADER.unpack_from(data)[1] == KIND_UDP:
        return ip_bytes + _UDP_BYTES
    return ip_bytes + (data[HEADER_BYTES + ip_bytes + 12] >> 4) * 4


def surviving_segments(data: bytes, packet: WirePacket, lost: Collection[int]) -> list[tuple[bytes, WirePacket]]:
    """Return `data`, which `packet` measures, without the segments whose places are in `lost`: runs, in order.

    A line loses single segments: each run between two losses goes on as a packet of its own, with the headers that a
    network card gives its segments (Linux, Documentation/networking/segmentation-offloads.rst).
    """
    kept = (place for place in range(packet.num_segments) if place not in lost)
    runs = [[place for _, place in run] for _, run in groupby(enumerate(kept), lambda one: one[1] - one[0])]
    return [_run(data, packet, run[0], run[-1] + 1) for run in runs]


def _run(data: bytes, packet: WirePacket, first: int, end: int) -> tuple[bytes, WirePacket]:
    if end - first == packet.num_segments:
        return data, packet
    flags, kind, header, size, checksum_start, checksum_offset = _HEADER.unpack_from(data)
    num_header_bytes = _headers_bytes(data)
    start = HEADER_BYTES + num_header_bytes
    payload = data[start + first * size : start + end * size]
    num_bytes = num_header_bytes + len(payload)
    ip_bytes = (data[HEADER_BYTES] & 15) * 4
    ip, transport = (
        bytearray(data[HEADER_BYTES : HEADER_BYTES + ip_bytes]),
        bytearray(data[HEADER_BYTES + ip_bytes : start]),
    )
    struct.pack_into("!HH", ip, 2, num_bytes, (int.from_bytes(ip[_ID_AT : _ID_AT + 2], "big") + first) & 0xFFFF)
    struct.pack_into("!H", ip, _IP_CHECKSUM_AT, 0)
    struct.pack_into("!H", ip, _IP_CHECKSUM_AT, ~_ones_sum(ip) & 0xFFFF)
    if kind == KIND_UDP:
        checksum_at = _UDP_CHECKSUM_AT
        struct.pack_into("!H", transport, 4, num_bytes - ip_bytes)
    else:
        checksum_at = _TCP_CHECKSUM_AT
        number = int.from_bytes(transport[4:8], "big") + first * size
        struct.pack_into("!I", transport, 4, number & 0xFFFFFFFF)
        if end < packet.num_segments:
            transport[_TCP_FLAGS_AT] &= ~_FIN_PUSH
        if first:
            transport[_TCP_FLAGS_AT] &= ~_CONGESTION_WINDOW_REDUCED
    # The device leaves the checksum to its receiver: the field has the sum of the pseudo-header only.
    pseudo = bytes(ip[_ADDRESSES]) + struct.pack("!HH", ip[_PROTOCOL_AT], num_bytes - ip_bytes)
    struct.pack_into("!H", transport, checksum_at, _ones_sum(pseudo))
    if end - first == 1:
        kind = size = 0
    head = _HEADER.pack(flags, kind, header, size, checksum_start, checksum_offset)
    wire_bytes = num_bytes + (end - first - 1) * num_header_bytes
    return b"".join((head, ip, transport, payload)), WirePacket(packet.target, end - first, wire_bytes)


def _ones_sum(data: bytes | bytearray) -> int:
    """Return the sum of 16-bit words in ones' complement (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)
