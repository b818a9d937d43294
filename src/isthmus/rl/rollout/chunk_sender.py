"""`ChunkSender`: what one connection sends: messages at once, chunks of weights one by one between them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from isthmus.rl.rollout.engine_messages import TokensReport
from isthmus.rl.rollout.message_link import BEAT_S, MessageLink
from isthmus.rl.rollout.wire_messages import Beat, Message, pack_message

MAX_PENDING_CHUNKS = 1 << 20
"""Most chunks that one connection may owe: those of several versions of a model of a trillion weights."""


class ChunkSender:
    """Sends over `link` from a thread of its own, with a beat where there is nothing else, until `close`.

    A chunk is a function that makes its message and content when its turn comes, or None where it can no longer.
    """

    def __init__(self, link: MessageLink, name: str) -> None:
        self._link = link
        self._messages: deque[Message] = deque()
        self._chunks: deque[Callable[[], tuple[Message, Any] | None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.weights_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"isthmus-sends-{name}", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message before the chunks that wait."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def send_chunk(self, make: Callable[[], tuple[Message, Any] | None]) -> None:
        """Send a chunk after the others; one that is too many ends the connection."""
        with self._changed:
            if len(self._chunks) >= MAX_PENDING_CHUNKS:
                self._is_closed = True
            self._chunks.append(make)
            self._changed.notify()

    def close(self, timeout_s: float | None = None) -> None:
        """Send the messages that wait, and end; with `timeout_s` wait for that."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if timeout_s is not None and self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (found := self._next()) is not None:
                message, content = found
                before = self._link.sent_bytes
                beside = message.routing if isinstance(message, TokensReport) else b""
                self._link.send(pack_message(message), beside if content is None else content)
                if content is not None:
                    self.weights_bytes += self._link.sent_bytes - before
        except OSError:
            return
        finally:
            self._link.close()

    def _next(self) -> tuple[Message, Any] | None:
        """Wait for what is to be sent; None at the end."""
        while True:
            with self._changed:
                if not self._messages and not self._chunks and not self._is_closed:
                    self._changed.wait(BEAT_S)
                if self._messages:
                    return self._messages.popleft(), None
                if self._is_closed:
                    return None
                make = self._chunks.popleft() if self._chunks else None
            if make is None:
                return Beat(), None
            if (chunk := make()) is not None:
                return chunk
