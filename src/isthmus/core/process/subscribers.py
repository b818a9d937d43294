"""`Subscribers`: callbacks that are called after each change, until their context exits. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Subscribers:
    """The callbacks of an object that changes; each is called on the thread that calls `notify`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: set[Callable[[], None]] = set()

    @contextmanager
    def subscribe(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` after every change until the context exits."""
        with self._lock:
            self._callbacks.add(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.discard(callback)

    def notify(self) -> None:
        """Call every callback."""
        with self._lock:
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()
