"""`Outbox`: what is to be sent to one peer, in pieces that any lane may take, until it has arrived."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from isthmus.comm.tcp.wire_format import DATA, RECEIVED, Head
from isthmus.core.errors import PeerError

QUEUE_MESSAGES = 256
"""Messages that may be on their way to one peer before `put` blocks."""

PIECE_BYTES = 256 * 2**10
"""Longest piece: a message of several goes by all lanes at once."""


@dataclass(eq=False)
class Piece:
    """Part of a message, or (`payload` empty) a frame of its own."""

    head: Head
    payload: memoryview


@dataclass(eq=False)
class _Message:
    """A message on its way: its pieces are taken, and its future done once the peer has all of them."""

    number: int
    pieces: list[Piece]
    num_bytes: int
    tag: int
    future: Future[None] = field(default_factory=Future)


class Outbox:
    """Messages by number, and the pieces of them that no lane has taken. Thread-safe.

    Messages of one tag go one after the other, the next when the one before has arrived: lanes overtake each
    other. Everything else goes as early as a lane is free. `fail` ends it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._notes: deque[Piece] = deque()
        self._under_way: dict[int, _Message] = {}
        self._behind: dict[int, deque[_Message]] = {}
        self._number = 0
        self._error: PeerError | None = None

    def put(self, tag: int, label: str, payload: memoryview, sent_s: float) -> Future[None]:
        """Queue a message; its future is done when it has arrived. Blocks while too many are on their way."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._under_way) < QUEUE_MESSAGES)
            if self._error is not None:
                failed: Future[None] = Future()
                failed.set_exception(self._error)
                return failed
            pieces = list(_cut(self._number, tag, label, payload, sent_s))
            message = _Message(self._number, pieces, len(payload), tag)
            self._number += 1
            self._under_way[message.number] = message
            if tag in self._behind:
                self._behind[tag].append(message)
            else:
                self._behind[tag] = deque()
                self._pieces.extend(message.pieces)
            self._changed.notify_all()
            return message.future

    def note(self, number: int) -> None:
        """Queue word to the peer that its message `number` has arrived here."""
        with self._changed:
            self._notes.append(Piece(Head(RECEIVED, number), memoryview(b"")))
            self._changed.notify_all()

    def take(self, at_most_bytes: int = PIECE_BYTES) -> Piece | None:
        """Return what a lane should send next, None where there is nothing, or that is longer."""
        with self._changed:
            while True:
                queue = self._notes or self._pieces
                if not queue or len(queue[0].payload) > at_most_bytes:
                    return None
                piece = queue.popleft()
                if piece.head.kind != DATA or piece.head.number in self._under_way:
                    return piece

    def has_pieces(self) -> bool:
        """Tell whether pieces of messages wait to be taken."""
        with self._changed:
            return bool(self._pieces)

    def give_back(self, pieces: list[Piece]) -> None:
        """Queue again, before all others, what a broken lane had taken and has not arrived."""
        with self._changed:
            kept = [one for one in pieces if one.head.kind != DATA or one.head.number in self._under_way]
            self._pieces.extendleft(reversed([one for one in kept if one.head.kind == DATA]))
            self._notes.extendleft(reversed([one for one in kept if one.head.kind != DATA]))
            self._changed.notify_all()

    def arrived(self, number: int) -> int | None:
        """Take note that the peer has message `number`; return its bytes, None where that was known."""
        with self._changed:
            message = self._under_way.pop(number, None)
            if message is None:
                return None
            behind = self._behind[message.tag]
            if behind:
                self._pieces.extend(behind.popleft().pieces)
            else:
                del self._behind[message.tag]
            self._changed.notify_all()
        message.future.set_result(None)
        return message.num_bytes

    def is_under_way(self, number: int) -> bool:
        """Tell whether message `number` has not arrived."""
        with self._changed:
            return number in self._under_way

    def fail(self, error: PeerError) -> None:
        """Fail every message that has not arrived, now and from now on; the first error is kept."""
        with self._changed:
            self._error = self._error or error
            failed, error = list(self._under_way.values()), self._error
            self._under_way.clear()
            self._behind.clear()
            self._pieces.clear()
            self._changed.notify_all()
        for message in failed:
            message.future.set_exception(error)

    def drop(self, error: PeerError) -> None:
        """Fail every message, and forget what else was to be told: nobody is there to hear it."""
        with self._changed:
            self._notes.clear()
        self.fail(error)

    def wait_for_work(self, timeout_s: float, or_else: Callable[[], bool]) -> bool:
        """Block until there is something to take or `or_else()`, after `wake`; False after `timeout_s`."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._notes or self._pieces or or_else(), timeout_s)
            return bool(ready)

    def wait_until_arrived(self, timeout_s: float) -> bool:
        """Block until nothing is on its way; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._under_way or self._notes), timeout_s)

    def wake(self) -> None:
        """Make who waits for work look again."""
        with self._changed:
            self._changed.notify_all()


def _cut(number: int, tag: int, label: str, payload: memoryview, sent_s: float) -> Iterator[Piece]:
    for offset in range(0, len(payload) or 1, PIECE_BYTES):
        part = payload[offset : offset + PIECE_BYTES]
        yield Piece(Head(DATA, number, tag, sent_s, label, len(payload), offset, len(part)), part)
