"""`FrameAssembly`: puts frames together from pieces and parity, in any order, each once, in bounded memory."""

from __future__ import annotations

from isthmus.core.errors import ProtocolError
from isthmus.wan.datagram.datagram_packet import ParityPacket, PiecePacket
from isthmus.wan.datagram.erasure_code import ErasureCode
from isthmus.wan.tunnel.seen_numbers import SeenNumbers

MAX_OPEN_FRAMES = 4096
"""Most frames from the oldest that is missing to the newest."""

MAX_HELD_BYTES = 2**26
"""Most bytes of frames that are not whole."""


class _Frame:
    __slots__ = ("count", "last_bytes", "parity", "pieces")

    def __init__(self, count: int) -> None:
        self.count, self.last_bytes = count, 0
        self.pieces: dict[int, bytes | memoryview] = {}
        self.parity: dict[int, bytes] = {}

    def held_bytes(self) -> int:
        return sum(map(len, self.pieces.values())) + sum(map(len, self.parity.values()))

    def joined(self) -> bytes:
        """Return the frame, with what is lost repaired."""
        if self.parity and len(self.pieces) < self.count:
            longest = len(next(iter(self.parity.values())))
            self.pieces |= ErasureCode(self.count, longest).repair(self.pieces, self.parity)
            self.pieces[self.count - 1] = self.pieces[self.count - 1][: self.last_bytes]
        return b"".join([self.pieces[at] for at in range(self.count)])


class FrameAssembly:
    """The frames of one direction of a leg, numbered from 0."""

    def __init__(self) -> None:
        self._whole, self._open = SeenNumbers(MAX_OPEN_FRAMES), dict[int, _Frame]()
        self.num_held_bytes = 0
        """Bytes of pieces and parity whose frame is not whole."""
        self.num_repaired = 0
        """Frames that were whole by their parity before all their pieces had come."""

    def add(self, piece: PiecePacket | ParityPacket) -> bytes | None:
        """Take a piece or parity; return its frame once it is whole. Raises `ProtocolError` beyond the bounds."""
        if piece.frame in self._whole:
            return None
        frame = self._open.get(piece.frame)
        if frame is None:
            frame = self._opened(piece)
        if frame.count != piece.count:
            raise ProtocolError(f"frame {piece.frame} has {frame.count} pieces, and {piece.count}")
        if isinstance(piece, ParityPacket):
            self._add_parity(frame, piece)
        elif piece.index not in frame.pieces:
            self._hold(len(piece.data))
            frame.pieces[piece.index] = piece.data
            if piece.index == piece.count - 1:
                _check_last(frame, len(piece.data))
        if len(frame.pieces) + len(frame.parity) < frame.count:
            return None
        self.num_held_bytes -= frame.held_bytes()
        self.num_repaired += len(frame.pieces) < frame.count
        del self._open[piece.frame]
        self._whole.add(piece.frame)
        return frame.joined()

    def _add_parity(self, frame: _Frame, parity: ParityPacket) -> None:
        _check_last(frame, parity.last_bytes)
        if parity.index not in frame.parity:
            self._hold(len(parity.data))
            frame.parity[parity.index] = parity.data

    def _hold(self, num_bytes: int) -> None:
        if self.num_held_bytes + num_bytes > MAX_HELD_BYTES:
            raise ProtocolError(f"{len(self._open)} frames are open, with {self.num_held_bytes} bytes")
        self.num_held_bytes += num_bytes

    def _opened(self, piece: PiecePacket | ParityPacket) -> _Frame:
        if piece.frame >= self._whole.floor + MAX_OPEN_FRAMES:
            raise ProtocolError(f"frame {piece.frame} is too far beyond {self._whole.floor}, which is missing")
        frame = self._open[piece.frame] = _Frame(piece.count)
        return frame


def _check_last(frame: _Frame, last_bytes: int) -> None:
    """Note the length of the last piece; raise `ProtocolError` if it was another one."""
    if frame.last_bytes not in (0, last_bytes):
        raise ProtocolError(f"the last piece of a frame has {frame.last_bytes} bytes, and {last_bytes}")
    frame.last_bytes = last_bytes
