"""`view_frame`: what a gateway needs of a RoCEv2 packet, read in place; a tenth of the time of `parse_roce`.

Sources: as `roce_packet`. The frame is checked as `parse_roce` checks it: lengths, protocol, checksum and ICRC.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from isthmus.core.errors import ProtocolError
from isthmus.wan.roce.roce_opcodes import EXTRA_BYTES, HAS_AETH, HAS_RETH, UDP_PORT
from isthmus.wan.roce.roce_packet import DUMMY_CRC, ICRC_BYTES

BTH_BYTES = 12
MAX_FRAME_BYTES = 9216
"""Longest IP packet that a gateway takes: a jumbo frame's."""

_IPV4 = struct.Struct("!xxHxxHxBxx8sHHHxxBBxxII")
_IPV6 = struct.Struct("!xxxxHBx32sHHHxxBBxxII")
_FROM_UDP = bytes(6) + b"\xff\xff" + bytes(4) + b"\xff" + bytes(7)
_MASK_4 = int.from_bytes(bytes.fromhex("00ff000000000000ff00ffff") + bytes(8) + _FROM_UDP, "big")
_MASK_6 = int.from_bytes(bytes.fromhex("0fffffff000000ff") + bytes(32) + _FROM_UDP, "big")
"""Fields up to the end of the base transport header that count as ones in the ICRC."""

_GOOD_CRC = 0x2144DF1C
"""CRC of anything with its own CRC behind it."""

_AFTER_BTH = tuple(
    16 * (opcode in HAS_RETH) + 4 * (opcode in HAS_AETH) + EXTRA_BYTES.get(opcode, 0) for opcode in range(256)
)


FlowKey = tuple[bytes, int]
"""Source and target address, and the target's queue pair: one direction of a queue pair."""


class RoceView(NamedTuple):
    """Fields of a frame."""

    frame: bytes
    ends: bytes
    """Source and target address: 8 bytes of IPv4 or 32 of IPv6."""
    queue_pair: int
    """Number of the target's queue pair."""
    source_port: int
    opcode: int
    psn: int
    wants_ack: bool
    base: int
    """Place of the base transport header."""
    num_payload_bytes: int
    key: FlowKey
    """The direction of a queue pair that the frame belongs to."""

    @property
    def read_bytes(self) -> int:
        """Bytes that a READ_REQUEST asks for."""
        return int.from_bytes(self.frame[self.base + 24 : self.base + 28], "big")

    @property
    def syndrome(self) -> int:
        """The syndrome of a frame with an AETH."""
        return self.frame[self.base + BTH_BYTES]

    @property
    def message(self) -> int:
        """The message sequence number of a frame with an AETH."""
        return int.from_bytes(self.frame[self.base + 13 : self.base + 16], "big")

    @property
    def has_congestion_mark(self) -> bool:
        """Whether a switch has marked the frame (ECN `congestion experienced`)."""
        byte = self.frame[1] if self.base == 28 else self.frame[1] >> 4
        return byte & 3 == 3


def swap_ends(ends: bytes) -> bytes:
    """Return the addresses of the other direction."""
    half = len(ends) // 2
    return ends[half:] + ends[:half]


def view_frame(frame: bytes) -> RoceView:
    """Return the fields of a frame; raise `ProtocolError` for one that is cut, forged or not RoCEv2."""
    size = len(frame)
    if not 44 <= size <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a RoCE packet of {size} bytes; 44 to {MAX_FRAME_BYTES} are taken")
    if frame[0] == 0x45:
        num_bytes, fragment, protocol, ends, source_port, target_port, udp_bytes, opcode, flags, pair, number = (
            _IPV4.unpack_from(frame)
        )
        if protocol != 17 or num_bytes != size or fragment & 0xBFFF:
            raise ProtocolError("an IPv4 packet of another protocol or length, or in fragments")
        if int.from_bytes(frame[:20], "big") % 0xFFFF:
            raise ProtocolError("the checksum of an IPv4 header is wrong")
        base, end = 28, 40
        head = (int.from_bytes(frame[:40], "big") | _MASK_4).to_bytes(40, "big")
    elif frame[0] >> 4 == 6:
        if size < 64:
            raise ProtocolError(f"a RoCE packet of {size} bytes over IPv6 is cut short")
        num_bytes, protocol, ends, source_port, target_port, udp_bytes, opcode, flags, pair, number = _IPV6.unpack_from(
            frame
        )
        if protocol != 17 or num_bytes != size - 40:
            raise ProtocolError("an IPv6 packet with extensions, of another protocol or length")
        base, end = 48, 60
        head = (int.from_bytes(frame[:60], "big") | _MASK_6).to_bytes(60, "big")
    else:
        raise ProtocolError("neither IPv6 nor IPv4 without options")
    if target_port != UDP_PORT or udp_bytes != size - base + 8:
        raise ProtocolError(f"UDP port {target_port} with {udp_bytes} bytes is not RoCE in {size - base + 8}")
    num_payload = size - end - ICRC_BYTES - _AFTER_BTH[opcode] - (flags >> 4 & 3)
    if num_payload < 0:
        raise ProtocolError(f"a packet with opcode {opcode:#04x} is cut short")
    if zlib.crc32(frame[end:], zlib.crc32(head, DUMMY_CRC)) != _GOOD_CRC:
        raise ProtocolError("the ICRC is wrong")
    queue_pair = pair & 0xFFFFFF
    return RoceView(
        frame, ends, queue_pair, source_port, opcode, number & 0xFFFFFF, number > 0x7FFFFFFF, base, num_payload,
        (ends, queue_pair),
    )  # fmt: skip
