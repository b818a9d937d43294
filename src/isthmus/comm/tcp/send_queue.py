"""`SendQueue`: the unacknowledged messages to one peer, in fragments that any connection may send."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from isthmus.comm.tcp.wire_format import ACK, DATA, MAX_FRAGMENT_BYTES, NOTICE, FrameHeader
from isthmus.core.errors import PeerError

MAX_UNACKED_MESSAGES = 256
"""Unacknowledged messages to one peer above which `put` blocks."""


@dataclass(eq=False)
class Fragment:
    """A fragment of a message, or a control frame, as header and payload; once taken it keeps its bytes."""

    header: FrameHeader
    payload: memoryview
    is_taken: bool = False

    def split(self, num_bytes: int) -> tuple[Fragment, Fragment]:
        """Return the first `num_bytes` and the rest."""
        first, rest = self.payload[:num_bytes], self.payload[num_bytes:]
        header = replace(self.header, payload_bytes=len(first))
        behind = replace(self.header, offset=self.header.offset + len(first), payload_bytes=len(rest))
        return Fragment(header, first), Fragment(behind, rest)


@dataclass(eq=False)
class _OutgoingMessage:
    """An unacknowledged message; its future is done when the peer acknowledges it."""

    number: int
    fragments: list[Fragment]
    num_bytes: int
    tag: int
    future: Future[None] = field(default_factory=Future)


class SendQueue:
    """Unacknowledged messages by number, and the fragments that no connection has taken. Thread-safe.

    Connections overtake each other, so a message waits until the previous one of its tag is acknowledged;
    messages of different tags are independent. `fail` ends the queue.

    As many idle connections wake as there are frames for. One that leaves some, or would block, wakes the next.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(lock := threading.Lock())
        self._has_work = threading.Condition(lock)
        self._fragments: deque[Fragment] = deque()
        self._acks: deque[Fragment] = deque()
        self._unacked: dict[int, _OutgoingMessage] = {}
        self._waiting_by_tag: dict[int, deque[_OutgoingMessage]] = {}
        self._next_number = 0
        self._error: PeerError | None = None

    def put(self, tag: int, label: str, payload: memoryview, sent_s: float) -> Future[None]:
        """Queue a message; its future is done when acknowledged. Blocks while too many are unacknowledged."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._unacked) < MAX_UNACKED_MESSAGES)
            if self._error is not None:
                failed: Future[None] = Future()
                failed.set_exception(self._error)
                return failed
            fragments = list(_split(self._next_number, tag, label, payload, sent_s))
            message = _OutgoingMessage(self._next_number, fragments, len(payload), tag)
            self._next_number += 1
            self._unacked[message.number] = message
            if tag in self._waiting_by_tag:
                self._waiting_by_tag[tag].append(message)
            else:
                self._waiting_by_tag[tag] = deque()
                self._queue(message)
            return message.future

    def queue_ack(self, number: int) -> None:
        """Queue an acknowledgement of message `number`."""
        with self._changed:
            self._acks.append(Fragment(FrameHeader(ACK, number), memoryview(b"")))
            self._has_work.notify()

    def queue_notice(self, tag: int, text: bytes) -> None:
        """Queue a notice ahead of all messages; one is sent even after `fail`."""
        size = len(text)
        with self._changed:
            header = FrameHeader(NOTICE, tag=tag, message_bytes=size, payload_bytes=size)
            self._acks.append(Fragment(header, memoryview(text)))
            self._has_work.notify()

    def take(self, max_bytes: int = MAX_FRAGMENT_BYTES, part_bytes: int = MAX_FRAGMENT_BYTES) -> Fragment | None:
        """Return the next fragment to send; None if there is none or it is longer than `max_bytes`.

        One that no connection has taken before is cut to `part_bytes`, and the next caller gets the rest. One that is
        sent again stays as it was, because its receiver knows fragments by their first byte.
        """
        with self._changed:
            while True:
                queue = self._acks or self._fragments
                if not queue or len(queue[0].payload) > max_bytes:
                    return None
                fragment = queue.popleft()
                if fragment.header.kind == DATA and fragment.header.number not in self._unacked:
                    continue
                if fragment.header.kind == DATA and not fragment.is_taken and len(fragment.payload) > part_bytes:
                    fragment, rest = fragment.split(part_bytes)
                    queue.appendleft(rest)
                fragment.is_taken = True
                if self._acks or self._fragments:
                    self._has_work.notify()
                if not (self._acks or self._unacked):
                    self._changed.notify_all()
                return fragment

    def has_fragments(self) -> bool:
        """Return whether message fragments are queued."""
        with self._changed:
            return bool(self._fragments)

    def requeue(self, fragments: list[Fragment]) -> None:
        """Requeue, first in line, the unacknowledged frames of a broken connection."""
        with self._changed:
            unacked = [one for one in fragments if one.header.kind != DATA or one.header.number in self._unacked]
            self._fragments.extendleft(reversed([one for one in unacked if one.header.kind == DATA]))
            self._acks.extendleft(reversed([one for one in unacked if one.header.kind != DATA]))
            self._has_work.notify_all()

    def mark_acked(self, number: int) -> int | None:
        """Complete message `number`; return its bytes, None for a duplicate acknowledgement."""
        with self._changed:
            message = self._unacked.pop(number, None)
            if message is None:
                return None
            behind = self._waiting_by_tag[message.tag]
            if behind:
                self._queue(behind.popleft())
            else:
                del self._waiting_by_tag[message.tag]
            self._changed.notify_all()
        message.future.set_result(None)
        return message.num_bytes

    def is_unacked(self, number: int) -> bool:
        """Return whether message `number` is unacknowledged."""
        with self._changed:
            return number in self._unacked

    def fail(self, error: PeerError) -> None:
        """Fail all unacknowledged and future messages with the first error given."""
        with self._changed:
            self._error = self._error or error
            failed, error = list(self._unacked.values()), self._error
            self._unacked.clear()
            self._waiting_by_tag.clear()
            self._fragments.clear()
            self._changed.notify_all()
            self._has_work.notify_all()
        for message in failed:
            message.future.set_exception(error)

    def drop(self, error: PeerError) -> None:
        """Fail every message and drop queued acknowledgements: the peer is unreachable."""
        with self._changed:
            self._acks.clear()
        self.fail(error)

    def wait_for_work(self, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Block until a frame is queued or, after `wake`, `stop()` holds; False after `timeout_s`."""
        with self._changed:
            ready = self._has_work.wait_for(lambda: self._acks or self._fragments or stop(), timeout_s)
            return bool(ready)

    def wait_until_acked(self, timeout_s: float) -> bool:
        """Block until everything is acknowledged; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._unacked or self._acks), timeout_s)

    def wake(self) -> None:
        """Wake all threads blocked in `wait_for_work`."""
        with self._changed:
            self._has_work.notify_all()

    def wake_next(self) -> None:
        """Wake one thread blocked in `wait_for_work`, which the caller leaves its work to."""
        with self._changed:
            self._has_work.notify()

    def _queue(self, message: _OutgoingMessage) -> None:
        self._fragments.extend(message.fragments)
        self._has_work.notify(len(message.fragments))


def _split(number: int, tag: int, label: str, payload: memoryview, sent_s: float) -> Iterator[Fragment]:
    for offset in range(0, len(payload) or 1, MAX_FRAGMENT_BYTES):
        data = payload[offset : offset + MAX_FRAGMENT_BYTES]
        yield Fragment(FrameHeader(DATA, number, tag, sent_s, label, len(payload), offset, len(data)), data)
