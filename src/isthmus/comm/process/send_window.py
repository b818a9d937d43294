"""`SendWindow`: bounds the shared memory that messages to one peer occupy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from isthmus.comm.tcp.send_queue import MAX_UNACKED_MESSAGES
from isthmus.core.errors import IsthmusError

WINDOW_BYTES = 64 * 2**20
"""Shared memory for messages in flight to one peer; a longer message is sent alone."""


@dataclass(eq=False)
class OutgoingMessage:
    """A message to send; `offset` is its place in shared memory once it is copied there."""

    number: int
    peer: int
    tag: int
    label: str
    payload: memoryview
    offset: int = 0
    future: Future[None] = field(default_factory=Future)


class SendWindow:
    """An ordered queue of messages to one peer with at most `limit_bytes` in flight. Thread-safe.

    `transmit(message)` copies a message into shared memory and notifies the transport process.
    """

    def __init__(self, transmit: Callable[[OutgoingMessage], None], limit_bytes: int = WINDOW_BYTES) -> None:
        self._transmit, self._limit_bytes = transmit, limit_bytes
        self._changed = threading.Condition()
        self._transmit_lock = threading.Lock()
        self._waiting: deque[OutgoingMessage] = deque()
        self._num_in_flight = self._in_flight_bytes = 0
        self._error: IsthmusError | None = None

    def put(self, message: OutgoingMessage) -> None:
        """Send `message` when the window allows; blocks while too many messages are pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._num_pending() < MAX_UNACKED_MESSAGES)
            error = self._error
            if error is None:
                self._waiting.append(message)
        if error is not None:
            message.future.set_exception(error)
        self._transmit_ready()

    def release(self, message: OutgoingMessage) -> None:
        """Release the window space of `message`; send what fits next."""
        with self._changed:
            self._num_in_flight -= 1
            self._in_flight_bytes -= len(message.payload)
            self._changed.notify_all()
        self._transmit_ready()

    def fail(self, error: IsthmusError) -> None:
        """Fail all waiting and future messages."""
        with self._changed:
            self._error = self._error or error
            failed = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for message in failed:
            message.future.set_exception(error)

    def wait_until_transmitted(self, timeout_s: float) -> bool:
        """Block until no message waits; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _num_pending(self) -> int:
        return len(self._waiting) + self._num_in_flight

    def _transmit_ready(self) -> None:
        """Send waiting messages, in order, while they fit."""
        with self._transmit_lock:
            while (message := self._next_message()) is not None:
                self._transmit(message)

    def _next_message(self) -> OutgoingMessage | None:
        with self._changed:
            if not self._waiting:
                return None
            size = len(self._waiting[0].payload)
            if self._num_in_flight and self._in_flight_bytes + size > self._limit_bytes:
                return None
            self._num_in_flight += 1
            self._in_flight_bytes += size
            self._changed.notify_all()
            return self._waiting.popleft()
