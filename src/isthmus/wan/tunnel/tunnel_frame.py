"""`TunnelFrame`: what two proxies exchange, and its header of fixed size.

A header is 32 bytes, big-endian: kind, three bytes of zero, payload bytes, number, stream, offset. Acknowledgements
and pings have no number; every other frame has one, counts until it is acknowledged, and is sent again on another leg
if its leg breaks.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from isthmus.core.errors import ProtocolError

HEADER = struct.Struct("!B3xIQQQ")
HEADER_BYTES = HEADER.size
MAX_PAYLOAD_BYTES = 512 * 2**10
"""Longest payload of a frame."""

USUAL_PAYLOAD_BYTES = 256 * 2**10
"""Longest payload of a frame on a leg that takes no longer ones, or takes long for them."""

MAX_TEXT_BYTES = 512
"""Longest target or reason."""

MAX_RANGES = 64
"""Most ranges of an acknowledgement."""

RANGE = struct.Struct("!QQ")
NO_NUMBER = 2**64 - 1
"""Number of a frame that is not acknowledged."""

MAX_OFFSET = 2**62


class FrameKind(enum.IntEnum):
    """What a frame says. `offset` is given in brackets."""

    PING = 0
    """The leg is alive."""
    ACK = 1
    """All frames below `offset` have arrived, and those of the ranges in the payload."""
    OPEN = 2
    """A worker wants a connection to the target in the payload [bytes that the opener takes]."""
    OPENED = 3
    """The connection to the target is open [bytes that this side takes]."""
    REFUSED = 4
    """It is not, for the reason in the payload."""
    DATA = 5
    """Bytes of a stream [of the first one]."""
    FIN = 6
    """The stream ends in this direction [number of its bytes]."""
    CREDIT = 7
    """The receiver takes bytes up to this offset [limit]."""
    RESET = 8
    """The stream broke, for the reason in the payload."""
    END = 9
    """The sending proxy ends the tunnel, for the reason in the payload."""


UNNUMBERED = frozenset({FrameKind.PING, FrameKind.ACK, FrameKind.END})

_LONGEST_PAYLOAD = {
    FrameKind.PING: 0,
    FrameKind.ACK: MAX_RANGES * RANGE.size,
    FrameKind.OPEN: MAX_TEXT_BYTES,
    FrameKind.OPENED: 0,
    FrameKind.REFUSED: MAX_TEXT_BYTES,
    FrameKind.DATA: MAX_PAYLOAD_BYTES,
    FrameKind.FIN: 0,
    FrameKind.CREDIT: 0,
    FrameKind.RESET: MAX_TEXT_BYTES,
    FrameKind.END: MAX_TEXT_BYTES,
}


@dataclass(frozen=True, slots=True)
class TunnelFrame:
    """A frame; `payload` belongs to it and does not change."""

    kind: FrameKind
    number: int = NO_NUMBER
    stream: int = 0
    offset: int = 0
    payload: bytes | bytearray | memoryview = b""

    def header(self) -> bytes:
        """Return the header in bytes."""
        return HEADER.pack(self.kind, len(self.payload), self.number, self.stream, self.offset)


def parse_frame_header(header: bytes | bytearray | memoryview) -> tuple[TunnelFrame, int]:
    """Return the frame of a header, still without payload, and the number of its payload's bytes.

    Raises `ProtocolError` for a header that no proxy writes.
    """
    if len(header) != HEADER_BYTES:
        raise ProtocolError(f"a frame header has {HEADER_BYTES} bytes, not {len(header)}")
    number_of_kind, num_bytes, number, stream, offset = HEADER.unpack(header)
    try:
        kind = FrameKind(number_of_kind)
    except ValueError:
        raise ProtocolError(f"unknown kind of frame: {number_of_kind}") from None
    if any(header[1:4]):
        raise ProtocolError("the reserved bytes of a frame header are not zero")
    if num_bytes > _LONGEST_PAYLOAD[kind] or (kind is FrameKind.DATA and num_bytes == 0):
        raise ProtocolError(f"a frame {kind.name} has {num_bytes} bytes of payload")
    if (number == NO_NUMBER) != (kind in UNNUMBERED) or (number != NO_NUMBER and number > MAX_OFFSET):
        raise ProtocolError(f"a frame {kind.name} has the number {number}")
    if offset > MAX_OFFSET or stream > MAX_OFFSET:
        raise ProtocolError(f"a frame {kind.name} has stream {stream} and offset {offset}")
    return TunnelFrame(kind, number, stream, offset), num_bytes


def parse_ranges(payload: bytes | bytearray | memoryview) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of an acknowledgement; raise `ProtocolError` for others than ascending ones."""
    if len(payload) % RANGE.size:
        raise ProtocolError(f"the ranges of an acknowledgement have {len(payload)} bytes")
    ranges = [RANGE.unpack_from(payload, place) for place in range(0, len(payload), RANGE.size)]
    last = -1
    for first, end in ranges:
        if not last < first < end <= MAX_OFFSET:
            raise ProtocolError(f"an acknowledgement has the range {first} to {end}")
        last = end
    return ranges


def parse_text(payload: bytes | bytearray | memoryview) -> str:
    """Return a target or a reason as printable ASCII; other bytes become `?`."""
    return "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in bytes(payload[:MAX_TEXT_BYTES]))
