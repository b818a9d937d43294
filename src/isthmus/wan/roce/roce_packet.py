"""`RocePacket`: a RoCEv2 packet from its IP header to its ICRC; `parse_roce`, `build_roce`, `icrc_of`.

Sources: InfiniBand Architecture Specification, volume 1: 9.2 (base transport header), 9.3 (extended headers), 7.8
(invariant CRC), annex A17 (RoCEv2). A packet that is parsed and built has the same bytes.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from dataclasses import dataclass

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce.roce_opcodes import EXTRA_BYTES, HAS_AETH, HAS_RETH, PSN_SPAN, UDP_PORT

ICRC_BYTES = 4
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV6 = struct.Struct("!IHBB16s16s")
_UDP = struct.Struct("!HHHH")
_BTH = struct.Struct("!BBHII")
RETH = struct.Struct("!QII")
"""Address, key, bytes."""
_AETH = struct.Struct("!I")
_PROTOCOL_UDP = 17
DUMMY_CRC = zlib.crc32(b"\xff" * 8)
"""CRC of the local route header that RoCE lacks, as ones."""


@dataclass(frozen=True, slots=True)
class RethHeader:
    """Where a WRITE goes or a READ comes from."""

    address: int
    key: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AethHeader:
    """An answer: `syndrome` 0x00 to 0x1F acknowledges with credits, 0x60 is a NAK for a wrong number."""

    syndrome: int
    message: int
    """Message sequence number, 24 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RocePacket:
    """A packet. Defaults are those of a NIC that sets nothing special."""

    source: str
    target: str
    opcode: int
    queue_pair: int
    """Number of the receiver's queue pair, 24 bits; the sender's is in no header."""
    psn: int
    """Packet sequence number, 24 bits."""
    source_port: int = 49152
    traffic_class: int = 2
    """DSCP and ECN; 2 says that the sender takes congestion marks."""
    hop_limit: int = 64
    identification: int = 0
    """IPv4 only."""
    dont_fragment: bool = True
    """IPv4 only."""
    flow_label: int = 0
    """IPv6 only."""
    udp_checksum: int = 0
    is_solicited: bool = False
    migration: bool = True
    version: int = 0
    partition: int = 0xFFFF
    is_marked: bool = False
    """FECN, on CNPs and forwarded marks."""
    reserved_bits: int = 0
    """BECN and the six reserved bits beside it."""
    wants_ack: bool = False
    ack_bits: int = 0
    """The seven reserved bits beside the request for an acknowledgement."""
    reth: RethHeader | None = None
    aeth: AethHeader | None = None
    extra: bytes = b""
    """Further headers: immediate data, keys to invalidate, atomic operands."""
    payload: bytes = b""
    padding: bytes = b""
    """Up to three bytes, so that the payload ends at a multiple of four."""


def icrc_of(frame: bytes | bytearray) -> bytes:
    """Return the invariant CRC of a packet that starts with its IP header and ends with four bytes of ICRC.

    Fields that routers may change count as ones. Raises `ProtocolError` if the packet has no place for one.
    """
    if len(frame) < 40 + ICRC_BYTES:
        raise ProtocolError(f"a packet of {len(frame)} bytes has no ICRC")
    if len(frame) < _udp_place(frame) + _UDP.size + _BTH.size + ICRC_BYTES:
        raise ProtocolError(f"a packet of {len(frame)} bytes has no base transport header")
    return crc_of_head(frame, len(frame) - ICRC_BYTES).to_bytes(ICRC_BYTES, "little")


def crc_of_head(frame: bytes | bytearray, end: int) -> int:
    """Return the invariant CRC of a packet up to `end`, which is at or behind the fields that routers may change."""
    is_4, header = frame[0] >> 4 == 4, _udp_place(frame)
    place = header + _UDP.size + 5
    view = bytearray(frame[:place])
    if is_4:
        view[1] = view[8] = view[10] = view[11] = 0xFF
    else:
        view[0] |= 0x0F
        view[1] = view[2] = view[3] = view[7] = 0xFF
    view[header + 6] = view[header + 7] = 0xFF
    view[-1] = 0xFF
    return zlib.crc32(memoryview(frame)[place:end], zlib.crc32(view, DUMMY_CRC))


def parse_roce(frame: bytes) -> RocePacket:
    """Return the RoCEv2 packet in an IP packet; raise `ProtocolError` for any other one, or a wrong ICRC."""
    if len(frame) < 1:
        raise ProtocolError("an empty packet")
    version = frame[0] >> 4
    if version == 4:
        place, fields = _parse_ipv4(frame)
    elif version == 6:
        place, fields = _parse_ipv6(frame)
    else:
        raise ProtocolError(f"IP version {version}")
    if len(frame) < place + _UDP.size + _BTH.size + ICRC_BYTES:
        raise ProtocolError(f"a RoCE packet of {len(frame)} bytes is cut short")
    source_port, target_port, udp_bytes, udp_checksum = _UDP.unpack_from(frame, place)
    if target_port != UDP_PORT or udp_bytes != len(frame) - place:
        raise ProtocolError(f"UDP port {target_port} with {udp_bytes} bytes is not RoCE in {len(frame) - place}")
    if frame[-ICRC_BYTES:] != icrc_of(frame):
        raise ProtocolError("the ICRC is wrong")
    return _parse_transport(
        frame[place + _UDP.size : -ICRC_BYTES],
        {**fields, "source_port": source_port, "udp_checksum": udp_checksum},
    )


def build_roce(packet: RocePacket) -> bytes:
    """Return the bytes of a packet with checksums and ICRC; raise `ProtocolError` for a field that has no room."""
    try:
        transport = _build_transport(packet)
        udp_bytes = _UDP.size + len(transport) + ICRC_BYTES
        udp = _UDP.pack(packet.source_port, UDP_PORT, udp_bytes, packet.udp_checksum)
        frame = _build_ip(packet, udp_bytes) + udp + transport + bytes(ICRC_BYTES)
    except (struct.error, ValueError, OverflowError) as error:
        raise ProtocolError(f"a field of a RoCE packet has no room: {error}") from error
    return frame[:-ICRC_BYTES] + icrc_of(frame)


def frame_of_payload(payload: bytes, source: str, target: str, source_port: int) -> bytes:
    """Return the IPv4 packet whose UDP payload a socket has received; fields that the ICRC leaves out are defaults."""
    udp_bytes = _UDP.size + len(payload)
    ends = ipaddress.IPv4Address(source).packed, ipaddress.IPv4Address(target).packed
    header = _IPV4.pack(0x45, 2, _IPV4.size + udp_bytes, 0, 0x4000, 64, _PROTOCOL_UDP, 0, *ends)
    header = header[:10] + _ipv4_checksum(header).to_bytes(2, "big") + header[12:]
    return header + _UDP.pack(source_port, UDP_PORT, udp_bytes, 0) + payload


def _udp_place(frame: bytes | bytearray) -> int:
    return (frame[0] & 15) * 4 if frame[0] >> 4 == 4 else 40


def _parse_ipv4(frame: bytes) -> tuple[int, dict[str, object]]:
    if len(frame) < _IPV4.size:
        raise ProtocolError(f"an IPv4 packet of {len(frame)} bytes")
    first, traffic_class, total, identification, flags, ttl, protocol, checksum, source, target = _IPV4.unpack_from(
        frame
    )
    if first != 0x45 or protocol != _PROTOCOL_UDP or total != len(frame) or flags not in (0, 0x4000):
        raise ProtocolError("an IPv4 packet with options, of another protocol, length, or in fragments")
    if checksum != _ipv4_checksum(frame[: _IPV4.size]):
        raise ProtocolError("the checksum of an IPv4 header is wrong")
    return _IPV4.size, {
        "source": str(ipaddress.IPv4Address(source)),
        "target": str(ipaddress.IPv4Address(target)),
        "traffic_class": traffic_class,
        "hop_limit": ttl,
        "identification": identification,
        "dont_fragment": flags == 0x4000,
    }


def _parse_ipv6(frame: bytes) -> tuple[int, dict[str, object]]:
    if len(frame) < _IPV6.size:
        raise ProtocolError(f"an IPv6 packet of {len(frame)} bytes")
    first, num_bytes, following, hop_limit, source, target = _IPV6.unpack_from(frame)
    if following != _PROTOCOL_UDP or num_bytes != len(frame) - _IPV6.size:
        raise ProtocolError("an IPv6 packet with extensions, of another protocol or length")
    return _IPV6.size, {
        "source": str(ipaddress.IPv6Address(source)),
        "target": str(ipaddress.IPv6Address(target)),
        "traffic_class": first >> 20 & 0xFF,
        "flow_label": first & 0xFFFFF,
        "hop_limit": hop_limit,
    }


def _parse_transport(data: bytes, fields: dict[str, object]) -> RocePacket:
    opcode, flags, partition, pair, number = _BTH.unpack_from(data)
    num_padding, place = flags >> 4 & 3, _BTH.size
    reth, aeth = None, None
    num_extra = EXTRA_BYTES.get(opcode, 0)
    needed = RETH.size * (opcode in HAS_RETH) + _AETH.size * (opcode in HAS_AETH) + num_extra + num_padding
    if len(data) < place + needed:
        raise ProtocolError(f"a packet with opcode {opcode:#04x} is cut short")
    if opcode in HAS_RETH:
        reth = RethHeader(*RETH.unpack_from(data, place))
        place += RETH.size
    if opcode in HAS_AETH:
        (word,) = _AETH.unpack_from(data, place)
        aeth = AethHeader(word >> 24, word & 0xFFFFFF)
        place += _AETH.size
    end = len(data) - num_padding
    return RocePacket(
        opcode=opcode,
        is_solicited=bool(flags & 0x80),
        migration=bool(flags & 0x40),
        version=flags & 15,
        partition=partition,
        is_marked=bool(pair >> 31),
        reserved_bits=pair >> 24 & 0x7F,
        queue_pair=pair & 0xFFFFFF,
        wants_ack=bool(number >> 31),
        ack_bits=number >> 24 & 0x7F,
        psn=number & 0xFFFFFF,
        reth=reth,
        aeth=aeth,
        extra=data[place : place + num_extra],
        payload=data[place + num_extra : end],
        padding=data[end:],
        **fields,  # type: ignore[arg-type]
    )


def _build_transport(packet: RocePacket) -> bytes:
    expected = EXTRA_BYTES.get(packet.opcode, 0)
    has = packet.reth is not None, packet.aeth is not None, len(packet.extra)
    if has != (packet.opcode in HAS_RETH, packet.opcode in HAS_AETH, expected) or len(packet.padding) > 3:
        raise ValueError(f"headers or padding do not fit opcode {packet.opcode:#04x}")
    if not (packet.queue_pair < PSN_SPAN and packet.psn < PSN_SPAN and packet.version < 16):
        raise ValueError(f"queue pair {packet.queue_pair}, number {packet.psn}, version {packet.version}")
    if packet.reserved_bits > 0x7F or packet.ack_bits > 0x7F:
        raise ValueError(f"reserved bits {packet.reserved_bits} and {packet.ack_bits}")
    flags = packet.is_solicited << 7 | packet.migration << 6 | len(packet.padding) << 4 | packet.version
    pair = packet.is_marked << 31 | packet.reserved_bits << 24 | packet.queue_pair
    number = packet.wants_ack << 31 | packet.ack_bits << 24 | packet.psn
    parts = [_BTH.pack(packet.opcode, flags, packet.partition, pair, number)]
    if packet.reth is not None:
        parts.append(RETH.pack(packet.reth.address, packet.reth.key, packet.reth.num_bytes))
    if packet.aeth is not None:
        if packet.aeth.message >= PSN_SPAN:
            raise ValueError(f"message {packet.aeth.message}")
        parts.append(_AETH.pack(packet.aeth.syndrome << 24 | packet.aeth.message))
    return b"".join([*parts, packet.extra, packet.payload, packet.padding])


def _build_ip(packet: RocePacket, udp_bytes: int) -> bytes:
    source, target = ipaddress.ip_address(packet.source), ipaddress.ip_address(packet.target)
    if source.version != target.version:
        raise ValueError(f"{source} and {target} are of different versions")
    if source.version == 6:
        if packet.traffic_class > 0xFF or packet.flow_label > 0xFFFFF:
            raise ValueError(f"traffic class {packet.traffic_class}, flow label {packet.flow_label}")
        first = 6 << 28 | packet.traffic_class << 20 | packet.flow_label
        return _IPV6.pack(first, udp_bytes, _PROTOCOL_UDP, packet.hop_limit, source.packed, target.packed)
    flags = 0x4000 if packet.dont_fragment else 0
    fields = 0x45, packet.traffic_class, _IPV4.size + udp_bytes, packet.identification, flags, packet.hop_limit
    header = _IPV4.pack(*fields, _PROTOCOL_UDP, 0, source.packed, target.packed)
    return header[:10] + _ipv4_checksum(header).to_bytes(2, "big") + header[12:]


def _ipv4_checksum(header: bytes) -> int:
    """Return the checksum of a header, whose own field counts as zero (RFC 1071)."""
    words: tuple[int, ...] = struct.unpack("!10H", header)
    total = sum(words) - words[5]
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
