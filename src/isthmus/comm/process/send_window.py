"""`Window`: bounds the shared memory that messages to one peer occupy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from isthmus.comm.tcp.send_queue import QUEUE_MESSAGES
from isthmus.core.errors import IsthmusError

WINDOW_BYTES = 64 * 2**20
"""Shared memory for messages in flight to one peer; a longer message is sent alone."""


@dataclass(eq=False)
class Sending:
    """A message to send; `offset` is its place in shared memory once it is copied there."""

    number: int
    peer: int
    tag: int
    label: str
    payload: memoryview
    offset: int = 0
    future: Future[None] = field(default_factory=Future)


class Window:
    """An ordered queue of messages to one peer with at most `limit_bytes` in flight. Thread-safe.

    `pass_on(message)` copies a message into shared memory and notifies the transport process.
    """

    def __init__(self, pass_on: Callable[[Sending], None], limit_bytes: int = WINDOW_BYTES) -> None:
        self._pass_on, self._limit_bytes = pass_on, limit_bytes
        self._changed = threading.Condition()
        self._passing = threading.Lock()
        self._waiting: deque[Sending] = deque()
        self._num_out = self._out_bytes = 0
        self._error: IsthmusError | None = None

    def put(self, message: Sending) -> None:
        """Send `message` when the window allows; blocks while too many messages are pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._num_waiting_and_out() < QUEUE_MESSAGES)
            error = self._error
            if error is None:
                self._waiting.append(message)
        if error is not None:
            message.future.set_exception(error)
        self._pass_on_all()

    def done(self, message: Sending) -> None:
        """Release the window space of `message`; send what fits next."""
        with self._changed:
            self._num_out -= 1
            self._out_bytes -= len(message.payload)
            self._changed.notify_all()
        self._pass_on_all()

    def fail(self, error: IsthmusError) -> None:
        """Fail all waiting and future messages."""
        with self._changed:
            self._error = self._error or error
            failed = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for message in failed:
            message.future.set_exception(error)

    def wait_until_passed_on(self, timeout_s: float) -> bool:
        """Block until no message waits; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _num_waiting_and_out(self) -> int:
        return len(self._waiting) + self._num_out

    def _pass_on_all(self) -> None:
        """Send waiting messages, in order, while they fit."""
        with self._passing:
            while (message := self._next()) is not None:
                self._pass_on(message)

    def _next(self) -> Sending | None:
        with self._changed:
            if not self._waiting:
                return None
            size = len(self._waiting[0].payload)
            if self._num_out and self._out_bytes + size > self._limit_bytes:
                return None
            self._num_out += 1
            self._out_bytes += size
            self._changed.notify_all()
            return self._waiting.popleft()
