"""`measure_packet`: what a packet of a TUN device is on the wire, where the device passes several segments at once.

Each packet begins with the `virtio_net_hdr` of Linux (`IFF_VNET_HDR`): flags, kind of segmentation offload, length of
the headers, payload of a segment, place of the checksum. A device with offload passes a run of TCP segments, or of UDP
datagrams that were sent together, as one packet, which its receiver takes as one too: a relay in Python then carries 1
Gbit/s in both directions on a share of a core.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

HEADER_BYTES = 10
"""Size of the header before each IP packet."""

VIRTIO_HEADER = struct.Struct("=BBHHHH")
KIND_UDP = 5
"""Kind of offload of UDP datagrams (VIRTIO_NET_HDR_GSO_UDP_L4); the others are TCP's."""

_IPV4_MIN_BYTES = 20
_TCP_MIN_BYTES = 20
_UDP_BYTES = 8


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
    _, kind, _, segment_bytes, _, _ = VIRTIO_HEADER.unpack_from(data)
    if not kind:
        return WirePacket(target, 1, num_bytes)
    ip_bytes = (data[HEADER_BYTES] & 15) * 4
    least_bytes = ip_bytes + (_UDP_BYTES if kind == KIND_UDP else _TCP_MIN_BYTES)
    if not segment_bytes or ip_bytes < _IPV4_MIN_BYTES or num_bytes < least_bytes:
        return None
    repeated_bytes = headers_bytes(data)
    if not least_bytes <= repeated_bytes <= num_bytes:
        return None
    num_segments = max(-(-(num_bytes - repeated_bytes) // segment_bytes), 1)
    return WirePacket(target, num_segments, num_bytes + (num_segments - 1) * repeated_bytes)


def headers_bytes(data: bytes) -> int:
    """Return the size of the IP and transport headers of a packet of several segments, which each segment has."""
    ip_bytes = (data[HEADER_BYTES] & 15) * 4
    if VIRTIO_HEADER.unpack_from(data)[1] == KIND_UDP:
        return ip_bytes + _UDP_BYTES
    return ip_bytes + (data[HEADER_BYTES + ip_bytes + 12] >> 4) * 4
