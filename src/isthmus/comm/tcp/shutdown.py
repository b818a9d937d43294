"""`Ending`: how a transport ends: a loss breaks it, or it is closed here, whichever comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from isthmus.core.errors import PeerError

Wakes = Sequence[Callable[[], None]]


class Ending:
    """Whether a transport is broken or closed, and who is to be woken then. Thread-safe."""

    def __init__(self) -> None:
        self.lost: PeerError | None = None
        self.closed = False
        self._lock, self._broken = threading.Lock(), threading.Event()
        self._wakes: list[Callable[[], None]] = []

    def loss(self, wait_s: float = 0.0) -> PeerError | None:
        """Return the loss that broke the transport, waiting up to `wait_s` for one; None if it is whole."""
        self._broken.wait(wait_s)
        return self.lost

    def when_over(self, wake: Callable[[], None]) -> None:
        """Add one who is to be woken; at once where it is over already."""
        with self._lock:
            over = self.lost is not None or self.closed
            if not over:
                self._wakes.append(wake)
        if over:
            wake()

    def lose(self, error: PeerError) -> Wakes | None:
        """Be broken by `error`; return whom to wake, None where it was over before."""
        with self._lock:
            if self.lost is not None or self.closed:
                return None
            self.lost = error
            self._broken.set()
            return self._taken()

    def close(self) -> Wakes | None:
        """Be closed; return who was not woken by a loss before, None where it was closed before."""
        with self._lock:
            if self.closed:
                return None
            self.closed = True
            return self._taken()

    def _taken(self) -> Wakes:
        """Return whom to wake, and let go of them: they hold what is to end with the transport."""
        wakes, self._wakes = self._wakes, []
        return wakes
