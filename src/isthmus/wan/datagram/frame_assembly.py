"""`FrameAssembly`: puts frames together from their pieces, in any order, each once, in bounded memory."""

from __future__ import annotations

from isthmus.core.errors import ProtocolError
from isthmus.wan.datagram.datagram_packet import MAX_PIECES, PIECE_BYTES, PiecePacket
from isthmus.wan.tunnel.seen_numbers import SeenNumbers

MAX_OPEN_FRAMES = 4096
"""Most frames from the oldest that is missing to the newest."""

MAX_HELD_BYTES = 2**26
"""Most bytes of frames that are not whole."""


class _Frame:
    __slots__ = ("missing", "pieces")

    def __init__(self, count: int) -> None:
        self.pieces: list[bytes | memoryview | None] = [None] * count
        self.missing = count


class FrameAssembly:
    """The frames of one direction of a leg, numbered from 0."""

    def __init__(self) -> None:
        self._whole, self._open = SeenNumbers(MAX_OPEN_FRAMES), dict[int, _Frame]()
        self.num_held_bytes = 0
        """Bytes of pieces whose frame is not whole."""

    def add(self, piece: PiecePacket) -> bytes | None:
        """Take a piece; return its frame once it is whole. Raises `ProtocolError` beyond the bounds."""
        if piece.frame in self._whole:
            return None
        frame = self._open.get(piece.frame)
        if frame is None:
            frame = self._opened(piece)
        if len(frame.pieces) != piece.count:
            raise ProtocolError(f"frame {piece.frame} has {len(frame.pieces)} pieces, and {piece.count}")
        if frame.pieces[piece.index] is not None:
            return None
        frame.pieces[piece.index] = piece.data
        frame.missing -= 1
        self.num_held_bytes += len(piece.data)
        if frame.missing:
            return None
        data = b"".join(one for one in frame.pieces if one is not None)
        self.num_held_bytes -= len(data)
        del self._open[piece.frame]
        self._whole.add(piece.frame)
        return data

    def _opened(self, piece: PiecePacket) -> _Frame:
        if piece.frame >= self._whole.floor + MAX_OPEN_FRAMES:
            raise ProtocolError(f"frame {piece.frame} is too far beyond {self._whole.floor}, which is missing")
        if self.num_held_bytes + MAX_PIECES * PIECE_BYTES > MAX_HELD_BYTES:
            raise ProtocolError(f"{len(self._open)} frames are open, with {self.num_held_bytes} bytes")
        frame = self._open[piece.frame] = _Frame(piece.count)
        return frame
