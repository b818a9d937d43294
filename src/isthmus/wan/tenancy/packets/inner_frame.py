"""`view_inner`: what a tenant gateway needs of an Ethernet frame, read in place.

RoCEv2 is recognised by its UDP port and a base transport header whose opcode exists (InfiniBand Architecture
Specification, volume 1, 9.2 and annex A17); ARP (RFC 826) and neighbour discovery (RFC 4861) by the address that they
ask for.
"""

from __future__ import annotations

from typing import NamedTuple

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce.roce_opcodes import UDP_PORT, Opcode
from isthmus.wan.tenancy.packets.frame_buffer import MAX_FRAME_BYTES, FrameBuffer

ETHERNET_BYTES = 14
IPV4, ARP, IPV6, VLAN = 0x0800, 0x0806, 0x86DD, 0x8100
TCP, UDP, ICMP, ICMPV6 = 6, 17, 1, 58
_WITH_PORTS = frozenset({TCP, UDP})
_NEIGHBOUR_MESSAGES = frozenset({135, 136})
_MIN_ROCE_BYTES = 8 + 12 + 4
_OPCODES = frozenset(int(one) for one in Opcode)


class InnerView(NamedTuple):
    """Fields of a frame."""

    ether_type: int
    source: bytes
    """Address of 4 or 16 bytes; of ARP the sender's."""
    target: bytes
    """The address that the frame is for; of a question for a neighbour the one that is asked for."""
    protocol: int
    """IP protocol; 0 for ARP."""
    source_port: int
    target_port: int
    """Ports of TCP and UDP, else 0."""
    is_roce: bool
    is_notification: bool
    """A RoCEv2 congestion notification packet."""
    base: int
    """Place of RoCEv2's base transport header in the buffer; else 0."""
    ecn: int
    is_neighbour_message: bool = False
    """Of IPv6; what ARP is for IPv4."""


def view_inner(buffer: FrameBuffer) -> InnerView:
    """Return the fields of a frame; raise `ProtocolError` for one that is cut, in fragments, or of another kind."""
    data, start, size = buffer.data, buffer.start, len(buffer)
    if not ETHERNET_BYTES <= size <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes")
    ether_type = data[start + 12] << 8 | data[start + 13]
    place, left = start + ETHERNET_BYTES, size - ETHERNET_BYTES
    if ether_type == IPV4:
        return _view_ipv4(data, place, left)
    if ether_type == IPV6:
        return _view_ipv6(data, place, left)
    if ether_type == ARP:
        if left < 28 or data[place : place + 6] != b"\0\1\x08\0\6\4":
            raise ProtocolError("ARP of other than IPv4 over Ethernet")
        source, target = bytes(data[place + 14 : place + 18]), bytes(data[place + 24 : place + 28])
        return InnerView(ARP, source, target, 0, 0, 0, False, False, 0, 0)
    raise ProtocolError(f"a frame of type {ether_type:#06x}")


def _view_ipv4(data: bytearray, place: int, left: int) -> InnerView:
    if left < 20 or data[place] >> 4 != 4:
        raise ProtocolError("an IPv4 packet that is cut short")
    header_bytes, total = (data[place] & 15) * 4, data[place + 2] << 8 | data[place + 3]
    if header_bytes < 20 or not header_bytes <= total <= left:
        raise ProtocolError(f"an IPv4 packet of {total} bytes in {left}")
    if data[place + 6] & 0x3F or data[place + 7]:
        raise ProtocolError("an IPv4 packet in fragments")
    source, target = bytes(data[place + 12 : place + 16]), bytes(data[place + 16 : place + 20])
    ports = _ports(data, place + header_bytes, total - header_bytes, data[place + 9])
    return InnerView(IPV4, source, target, data[place + 9], *ports, data[place + 1] & 3)


def _view_ipv6(data: bytearray, place: int, left: int) -> InnerView:
    if left < 40 or data[place] >> 4 != 6:
        raise ProtocolError("an IPv6 packet that is cut short")
    num_bytes, protocol = data[place + 4] << 8 | data[place + 5], data[place + 6]
    if num_bytes > left - 40:
        raise ProtocolError(f"an IPv6 packet of {num_bytes} bytes in {left - 40}")
    source, target = bytes(data[place + 8 : place + 24]), bytes(data[place + 24 : place + 40])
    is_neighbour = protocol == ICMPV6 and num_bytes >= 24 and data[place + 40] in _NEIGHBOUR_MESSAGES
    if is_neighbour and target[0] == 0xFF:
        target = bytes(data[place + 48 : place + 64])
    ports = _ports(data, place + 40, num_bytes, protocol)
    return InnerView(IPV6, source, target, protocol, *ports, data[place + 1] >> 4 & 3, is_neighbour)


def _ports(data: bytearray, place: int, left: int, protocol: int) -> tuple[int, int, bool, bool, int]:
    """Return both ports, whether it is RoCEv2, whether a congestion notification, and where its transport begins."""
    if protocol not in _WITH_PORTS:
        return 0, 0, False, False, 0
    if left < 8:
        raise ProtocolError("ports that are cut off")
    source, target = data[place] << 8 | data[place + 1], data[place + 2] << 8 | data[place + 3]
    if protocol != UDP:
        return source, target, False, False, 0
    if not 8 <= data[place + 4] << 8 | data[place + 5] <= left:
        raise ProtocolError("a UDP length beyond its packet")
    is_roce = target == UDP_PORT and left >= _MIN_ROCE_BYTES and data[place + 8] in _OPCODES
    return source, target, is_roce, is_roce and data[place + 8] == Opcode.CNP, place + 8 if is_roce else 0
