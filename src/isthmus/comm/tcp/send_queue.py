"""`Outbox`: the unacknowledged messages to one peer, in fragments that any connection may send."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from isthmus.comm.tcp.wire_format import DATA, RECEIVED, Head
from isthmus.core.errors import PeerError

QUEUE_MESSAGES = 256
"""Unacknowledged messages to one peer above which `put` blocks."""

PIECE_BYTES = 256 * 2**10
"""Fragment size: the fragments of a longer message use all connections in parallel."""


@dataclass(eq=False)
class Piece:
    """A fragment of a message, or a control frame, as header and payload."""

    head: Head
    payload: memoryview


@dataclass(eq=False)
class _Message:
    """An unacknowledged message; its future is done when the peer acknowledges it."""

    number: int
    pieces: list[Piece]
    num_bytes: int
    tag: int
    future: Future[None] = field(default_factory=Future)


class Outbox:
    """Unacknowledged messages by number, and the fragments that no connection has taken. Thread-safe.

    Connections overtake each other, so a message waits until the previous one of its tag is acknowledged;
    messages of different tags are independent. `fail` ends the queue.
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
        """Queue a message; its future is done when acknowledged. Blocks while too many are unacknowledged."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._under_way) < QUEUE_MESSAGES)
            if self._error is not None:
                failed: Future[None] = Future()
                failed.set_exception(self._error)
                return failed
            fragments = list(_cut(self._number, tag, label, payload, sent_s))
            message = _Message(self._number, fragments, len(payload), tag)
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
        """Queue an acknowledgement of message `number`."""
        with self._changed:
            self._notes.append(Piece(Head(RECEIVED, number), memoryview(b"")))
            self._changed.notify_all()

    def take(self, at_most_bytes: int = PIECE_BYTES) -> Piece | None:
        """Return the next fragment to send; None if there is none or it is longer than `at_most_bytes`."""
        with self._changed:
            while True:
                queue = self._notes or self._pieces
                if not queue or len(queue[0].payload) > at_most_bytes:
                    return None
                fragment = queue.popleft()
                if fragment.head.kind != DATA or fragment.head.number in self._under_way:
                    return fragment

    def has_pieces(self) -> bool:
        """Return whether message fragments are queued."""
        with self._changed:
            return bool(self._pieces)

    def give_back(self, pieces: list[Piece]) -> None:
        """Requeue, first in line, the unacknowledged frames of a broken connection."""
        with self._changed:
            unacked = [one for one in pieces if one.head.kind != DATA or one.head.number in self._under_way]
            self._pieces.extendleft(reversed([one for one in unacked if one.head.kind == DATA]))
            self._notes.extendleft(reversed([one for one in unacked if one.head.kind != DATA]))
            self._changed.notify_all()

    def arrived(self, number: int) -> int | None:
        """Complete message `number`; return its bytes, None for a duplicate acknowledgement."""
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
        """Return whether message `number` is unacknowledged."""
        with self._changed:
            return number in self._under_way

    def fail(self, error: PeerError) -> None:
        """Fail all unacknowledged and future messages with the first error given."""
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
        """Fail every message and drop queued acknowledgements: the peer is unreachable."""
        with self._changed:
            self._notes.clear()
        self.fail(error)

    def wait_for_work(self, timeout_s: float, or_else: Callable[[], bool]) -> bool:
        """Block until a frame is queued or, after `wake`, `or_else()` holds; False after `timeout_s`."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._notes or self._pieces or or_else(), timeout_s)
            return bool(ready)

    def wait_until_arrived(self, timeout_s: float) -> bool:
        """Block until everything is acknowledged; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._under_way or self._notes), timeout_s)

    def wake(self) -> None:
        """Wake threads blocked in `wait_for_work`."""
        with self._changed:
            self._changed.notify_all()


def _cut(number: int, tag: int, label: str, payload: memoryview, sent_s: float) -> Iterator[Piece]:
    for offset in range(0, len(payload) or 1, PIECE_BYTES):
        data = payload[offset : offset + PIECE_BYTES]
        yield Piece(Head(DATA, number, tag, sent_s, label, len(payload), offset, len(data)), data)
