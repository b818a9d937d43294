"""`Shutdown`: the terminal state of a transport: broken by a loss or closed, whichever comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from isthmus.core.errors import PeerError

Callbacks = Sequence[Callable[[], None]]


class Shutdown:
    """Whether a transport is broken or closed, and the callbacks for that moment. Thread-safe."""

    def __init__(self) -> None:
        self.lost: PeerError | None = None
        self.closed = False
        self._lock, self._broken = threading.Lock(), threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, waiting up to `wait_s` for one; None if it is intact."""
        self._broken.wait(wait_s)
        return self.lost

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Register `callback`; call it immediately if the transport is already broken or closed."""
        with self._lock:
            over = self.lost is not None or self.closed
            if not over:
                self._callbacks.append(callback)
        if over:
            callback()

    def mark_lost(self, error: PeerError) -> Callbacks | None:
        """Mark as broken by `error`; return the callbacks to run, None if already broken or closed."""
        with self._lock:
            if self.lost is not None or self.closed:
                return None
            self.lost = error
            self._broken.set()
            return self._take_callbacks()

    def mark_closed(self) -> Callbacks | None:
        """Mark as closed; return the callbacks that no loss has run yet, None if already closed."""
        with self._lock:
            if self.closed:
                return None
            self.closed = True
            return self._take_callbacks()

    def _take_callbacks(self) -> Callbacks:
        """Return and drop the callbacks: they reference objects that must be freed with the transport."""
        wakes, self._callbacks = self._callbacks, []
        return wakes
