"""What a packet of a datagram leg holds, inside its encryption: a piece or parity of a frame, acknowledgement, or end.

| kind | fields |
|---|---|
| PIECE | frame u32, piece u16, pieces of the frame u16, bytes: `PIECE_BYTES` of them but in the last piece |
| ACK | microseconds since the newest named packet came u32, ranges u8, each: first packet u64, packets u16 |
| CLOSE | none |
| PARITY | frame u32, parity u8, pieces of the frame u8, bytes of its last piece u16, bytes as of its first piece |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from isthmus.core.errors import ProtocolError
from isthmus.wan.datagram.erasure_code import MAX_PARITY
from isthmus.wan.tunnel.tunnel_frame import HEADER_BYTES, USUAL_PAYLOAD_BYTES

MAX_CONTENT_BYTES = 1375
"""Longest content: with number, tag and headers a packet has 1,428 bytes, so that a VXLAN header fits in 1,500."""

_PIECE = struct.Struct("!BIHH")
_PARITY = struct.Struct("!BIBBH")
_ACK = struct.Struct("!BIB")
_RANGE = struct.Struct("!QH")
PIECE_BYTES = MAX_CONTENT_BYTES - _PIECE.size
"""Bytes of a frame in each of its pieces but the last."""

MAX_PIECES = -(-(HEADER_BYTES + USUAL_PAYLOAD_BYTES) // PIECE_BYTES)
"""Most pieces of a frame."""

MAX_RANGES = 64
"""Most ranges of an acknowledgement."""

_MAX_DELAY_US = 2**32 - 1


class LegPacketKind(IntEnum):
    """The first byte."""

    PIECE = 1
    ACK = 2
    CLOSE = 3
    PARITY = 4


@dataclass(frozen=True, slots=True)
class PiecePacket:
    """Piece `index` of `count` of a frame."""

    frame: int
    index: int
    count: int
    data: bytes | memoryview

    def content(self) -> bytes:
        """Return the bytes of the packet."""
        return _PIECE.pack(LegPacketKind.PIECE, self.frame, self.index, self.count) + self.data


@dataclass(frozen=True, slots=True)
class ParityPacket:
    """Parity `index` of the `count` pieces of a frame, the last of which has `last_bytes`; see `ErasureCode`."""

    frame: int
    index: int
    count: int
    last_bytes: int
    data: bytes

    def content(self) -> bytes:
        """Return the bytes of the packet."""
        return _PARITY.pack(LegPacketKind.PARITY, self.frame, self.index, self.count, self.last_bytes) + self.data


@dataclass(frozen=True, slots=True)
class AckPacket:
    """Packets that have come: ranges of (first number, how many), the newest last."""

    delay_s: float
    ranges: tuple[tuple[int, int], ...]

    def content(self) -> bytes:
        """Return the bytes of the packet."""
        delay_us = min(int(self.delay_s * 1e6), _MAX_DELAY_US)
        named = b"".join(_RANGE.pack(*one) for one in self.ranges)
        return _ACK.pack(LegPacketKind.ACK, delay_us, len(self.ranges)) + named


@dataclass(frozen=True, slots=True)
class ClosePacket:
    """The sender has closed the leg."""

    def content(self) -> bytes:
        """Return the bytes of the packet."""
        return bytes([LegPacketKind.CLOSE])


DatagramPacket = PiecePacket | ParityPacket | AckPacket | ClosePacket


def parse_packet(content: bytes) -> DatagramPacket:
    """Return what `content` holds; raise `ProtocolError` for anything that `content()` does not make."""
    kind = content[0] if content else 0
    if kind == LegPacketKind.PIECE and len(content) > _PIECE.size:
        _, frame, index, count = _PIECE.unpack_from(content)
        data = content[_PIECE.size :]
        is_last = index == count - 1
        if not 0 < count <= MAX_PIECES or index >= count or (len(data) != PIECE_BYTES and not is_last):
            raise ProtocolError(f"piece {index} of {count} with {len(data)} bytes")
        if len(data) > PIECE_BYTES:
            raise ProtocolError(f"a piece of {len(data)} bytes, the longest has {PIECE_BYTES}")
        return PiecePacket(frame, index, count, data)
    if kind == LegPacketKind.ACK and len(content) >= _ACK.size:
        _, delay_us, num_ranges = _ACK.unpack_from(content)
        if num_ranges > MAX_RANGES or len(content) != _ACK.size + num_ranges * _RANGE.size:
            raise ProtocolError(f"an acknowledgement of {num_ranges} ranges in {len(content)} bytes")
        return AckPacket(delay_us / 1e6, tuple(_RANGE.iter_unpack(content[_ACK.size :])))
    if kind == LegPacketKind.CLOSE and len(content) == 1:
        return ClosePacket()
    if kind == LegPacketKind.PARITY and len(content) > _PARITY.size:
        _, frame, index, count, last_bytes = _PARITY.unpack_from(content)
        data = content[_PARITY.size :]
        expected = last_bytes if count == 1 else PIECE_BYTES
        if not 0 < count <= MAX_PIECES or index >= MAX_PARITY or not 0 < last_bytes <= PIECE_BYTES:
            raise ProtocolError(f"parity {index} of {count} pieces, the last of {last_bytes} bytes")
        if len(data) != expected:
            raise ProtocolError(f"parity of {len(data)} bytes for pieces of {expected}")
        return ParityPacket(frame, index, count, last_bytes, data)
    raise ProtocolError(f"a packet of kind {kind} with {len(content)} bytes")
