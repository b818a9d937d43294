"""Wire format between two workers after their greeting: frames of header, label and payload, each a part of a channel.

Header (network byte order): kind (1 byte), label length (1), message number (8), tag (8, signed), send time
(8, double: epoch seconds on the sender's clock), time of writing this frame (8, the same), message bytes (8), offset
of the payload in the message (8), payload bytes (8). The label is UTF-8.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.comm.channel.channel import MAX_PART_BYTES, Channel, Part

FORMAT_VERSION = 6
DATA, HEARTBEAT, CLOSE, ACK, NOTICE = 1, 2, 3, 4, 5
"""Frame kinds. `DATA` carries a fragment of a message; `CLOSE` the reason, empty for an orderly close;
`ACK` acknowledges the message of its number; the number of a `HEARTBEAT` is the milliseconds to the next one, if there
is nothing else to send until then. Both have no payload. `NOTICE` tells the peer's transport
something about the run: the tag says what (`Notice`), the payload is its text. It may arrive twice."""

MAX_REASON_BYTES = 4096
MAX_NOTICE_BYTES = 4096
MAX_FRAGMENT_BYTES = MAX_PART_BYTES
"""Longest payload of a frame: the fragments of a longer message use all connections in parallel."""

_HEADER = struct.Struct("!BBQqddQQQ")
_MAX_MESSAGE_BYTES = {DATA: 2**63, HEARTBEAT: 0, CLOSE: MAX_REASON_BYTES, ACK: 0, NOTICE: MAX_NOTICE_BYTES}
"""Upper bound on a message by kind. The receiver bounds those with `DATA` by what it expects."""


@dataclass(frozen=True)
class FrameHeader:
    """A frame header; the payload is `payload_bytes` bytes at `offset` of message `number`, `message_bytes` long."""

    kind: int
    number: int = 0
    tag: int = 0
    sent_s: float = 0.0
    label: str = ""
    message_bytes: int = 0
    offset: int = 0
    payload_bytes: int = 0
    # When a connection began to write the frame.
    left_s: float = 0.0


def pack_header(header: FrameHeader) -> bytes:
    """Return header and label as bytes."""
    label = header.label.encode()
    fixed = _HEADER.pack(
        header.kind,
        len(label),
        header.number,
        header.tag,
        header.sent_s,
        header.left_s,
        header.message_bytes,
        header.offset,
        header.payload_bytes,
    )
    return fixed + label


def frame_parts(header: FrameHeader, payload: Part) -> list[Part]:
    """Return the parts of a frame: the fixed header, then label and payload unless empty."""
    packed = pack_header(header)
    parts: tuple[Part, ...] = (packed[: _HEADER.size], packed[_HEADER.size :], payload)
    return [part for part in parts if len(part)]


def read_header(channel: Channel, tolerate_silence: Callable[[], bool] = lambda: False) -> FrameHeader:
    """Receive one header and its label.

    Raises `ConnectionResetError` if the peer closed, `TimeoutError` on silence unless `tolerate_silence()`,
    `ValueError` for a malformed header.
    """
    fixed = bytearray(_HEADER.size)
    channel.read_into(memoryview(fixed), tolerate_silence)
    kind, label_bytes, number, tag, sent_s, left_s, num_bytes, offset, size = _HEADER.unpack(fixed)
    if num_bytes > _MAX_MESSAGE_BYTES.get(kind, -1) or offset + size > num_bytes or size > MAX_FRAGMENT_BYTES:
        raise ValueError(f"kind {kind} with {size} of {num_bytes} bytes")
    if not (math.isfinite(sent_s) and math.isfinite(left_s)):
        raise ValueError(f"message {number} has the times {sent_s} and {left_s}")
    label = bytearray(label_bytes)
    if label_bytes:
        channel.read_into(memoryview(label), tolerate_silence)
    return FrameHeader(kind, number, tag, sent_s, label.decode(), num_bytes, offset, size, left_s)
