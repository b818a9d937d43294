"""`OutgoingFrames`: frames cut into pieces, with parity where asked, until enough have arrived to make each whole."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from isthmus.wan.datagram.datagram_packet import MAX_PIECES, PIECE_BYTES, ParityPacket, PiecePacket
from isthmus.wan.datagram.erasure_code import ErasureCode
from isthmus.wan.datagram.frame_assembly import MAX_OPEN_FRAMES
from isthmus.wan.datagram.parity_amount import ParityAmount

MAX_UNACKNOWLEDGED_BYTES = 2**25
"""Most bytes of frames that have not arrived whole; the owner is asked for no more."""

_LOW_WATER_BYTES = 64 * 2**10


@dataclass(slots=True)
class FramePiece:
    """A piece of a frame, or parity, that waits, is on its way, or has arrived."""

    packet: PiecePacket | ParityPacket
    is_acknowledged: bool = False


@dataclass(slots=True)
class _Frame:
    data: bytes
    count: int
    num_missing: int
    missing_bytes: int


class OutgoingFrames:
    """One direction of a leg. `has_parity` may be set at any time; it holds for frames that end afterwards."""

    def __init__(self, *, has_parity: bool = False) -> None:
        self.has_parity, self.parity = has_parity, ParityAmount()
        self.num_unacknowledged_bytes, self.num_pieces_again = 0, 0
        self._open = OrderedDict[int, _Frame]()
        self._fresh, self._again = deque[FramePiece](), deque[FramePiece]()
        self._fresh_bytes, self._next_frame = 0, 0

    @property
    def has_waiting(self) -> bool:
        """Whether a piece waits to leave."""
        return bool(self._again or self._fresh)

    @property
    def has_room(self) -> bool:
        """Whether another frame may be added."""
        room = self._fresh_bytes < _LOW_WATER_BYTES and self.num_unacknowledged_bytes < MAX_UNACKNOWLEDGED_BYTES
        return room and self._next_frame < next(iter(self._open), self._next_frame) + MAX_OPEN_FRAMES // 2

    def add(self, data: bytes) -> None:
        """Cut a frame; raise `ValueError` for one that is empty or too long."""
        view, count = memoryview(data), -(-len(data) // PIECE_BYTES)
        if not 0 < count <= MAX_PIECES:
            raise ValueError(f"a frame of {len(data)} bytes")
        for index in range(count):
            piece = view[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            self._fresh.append(FramePiece(PiecePacket(self._next_frame, index, count, piece)))
        self._open[self._next_frame] = _Frame(data, count, count, len(data))
        self._next_frame += 1
        self._fresh_bytes += len(view)
        self.num_unacknowledged_bytes += len(view)

    def next_piece(self) -> FramePiece | None:
        """Return what leaves next: lost pieces first; after the last piece of a frame its parity."""
        while self._again:
            piece = self._again.popleft()
            if self._is_needed(piece):
                self.num_pieces_again += 1
                return piece
        while self._fresh:
            piece = self._fresh.popleft()
            packet = piece.packet
            if isinstance(packet, PiecePacket):
                self._fresh_bytes -= len(packet.data)
                if self.has_parity and packet.index == packet.count - 1:
                    self._fresh.extendleft(map(FramePiece, reversed(self._parity_of(packet.frame))))
                return piece
            if self._is_needed(piece):
                return piece
        return None

    def arrived(self, piece: FramePiece) -> None:
        """Note that a piece has arrived."""
        frame = self._open.get(piece.packet.frame)
        if piece.is_acknowledged or frame is None:
            return
        piece.is_acknowledged = True
        if isinstance(piece.packet, PiecePacket):
            frame.missing_bytes -= len(piece.packet.data)
            self.num_unacknowledged_bytes -= len(piece.packet.data)
        frame.num_missing -= 1
        if not frame.num_missing:
            self.num_unacknowledged_bytes -= frame.missing_bytes
            del self._open[piece.packet.frame]

    def lost(self, piece: FramePiece) -> None:
        """Send a lost piece again unless its frame is whole without it; parity is sent once."""
        if isinstance(piece.packet, PiecePacket) and self._is_needed(piece):
            self._again.append(piece)

    def _is_needed(self, piece: FramePiece) -> bool:
        return not piece.is_acknowledged and piece.packet.frame in self._open

    def _parity_of(self, number: int) -> list[ParityPacket]:
        frame = self._open[number]
        longest = min(len(frame.data), PIECE_BYTES)
        last_bytes = len(frame.data) - (frame.count - 1) * PIECE_BYTES
        made = ErasureCode(frame.count, longest).parity(frame.data, self.parity.for_pieces(frame.count))
        return [ParityPacket(number, index, frame.count, last_bytes, data) for index, data in enumerate(made)]
