"""The end of a transport: broken by a loss or closed, whichever comes first.

`Shutdown` is the state, `BreakableTransport` the behaviour that the TCP and the process transport share.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
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


class BreakableTransport(ABC):
    """The part of a `Transport` that a loss concerns. `on_loss` is called once, with the loss that broke it."""

    def __init__(self, on_loss: Callable[[PeerError], None]) -> None:
        self._shutdown, self._on_loss = Shutdown(), on_loss

    @abstractmethod
    def _fail_messages(self, error: PeerError) -> None:
        """Fail the messages that can no longer complete."""

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, waiting up to `wait_s` for one; None if it is intact."""
        return self._shutdown.loss(wait_s)

    def add_loss_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when a loss breaks the transport or it is aborted."""
        self._shutdown.add_callback(callback)

    def _on_peer_lost(self, error: PeerError) -> None:
        """Break the transport, unless it is broken or closed already."""
        wakes = self._shutdown.mark_lost(error)
        if wakes is None:
            return
        self._fail_messages(error)
        for wake in wakes:
            wake()
        self._on_loss(error)
