"""Frames in the TCP connection between two gateways: `TcpFrames`, `pack_tcp_frame`, `pack_tcp_ack`.

| field | bytes | |
|---|---|---|
| kind | 1 | 1: frame, 2: acknowledgement |
| VNI | 3 | of a frame |
| number | 4 | of the frame, or of the last one that has come |
| length | 4 | of the frame that follows; 0 in an acknowledgement |
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from isthmus.core.errors import ProtocolError
from isthmus.wan.tenancy.packets.frame_buffer import MAX_FRAME_BYTES

_HEAD = struct.Struct("!III")
_FRAME, _ACK = 1, 2


class TcpEntry(NamedTuple):
    """A frame, or an acknowledgement, whose `frame` is None."""

    number: int
    vni: int
    frame: bytes | None


def pack_tcp_frame(vni: int, number: int, frame: bytes | memoryview) -> bytes:
    """Return a frame as it goes into the connection."""
    return b"".join((_HEAD.pack(_FRAME << 24 | vni, number, len(frame)), frame))


def pack_tcp_ack(number: int) -> bytes:
    """Return the acknowledgement of all frames up to `number`."""
    return _HEAD.pack(_ACK << 24, number, 0)


class TcpFrames:
    """Reads a connection; keeps at most one frame that has not come whole."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[TcpEntry]:
        """Return the entries that are whole. Raises `ProtocolError` for what is none: end the connection."""
        data = self._rest + data
        place, found = 0, list[TcpEntry]()
        while len(data) - place >= _HEAD.size:
            first, number, num_bytes = _HEAD.unpack_from(data, place)
            kind = first >> 24
            is_right = num_bytes <= MAX_FRAME_BYTES if kind == _FRAME else kind == _ACK and not num_bytes
            if not is_right:
                raise ProtocolError(f"an entry of kind {kind} with {num_bytes} bytes in a connection of frames")
            end = place + _HEAD.size + num_bytes
            if end > len(data):
                break
            frame = data[place + _HEAD.size : end] if kind == _FRAME else None
            found.append(TcpEntry(number, first & 0xFFFFFF, frame))
            place = end
        self._rest = data[place:]
        return found
