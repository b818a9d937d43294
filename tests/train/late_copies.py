"""A stand-in for a device's copy streams: nothing is copied before a thread waits for the end of a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class LateCopies:
    """Copies among CPU tensors, as late as they may be; what is read too early is seen to be wrong.

    `told` lists the requests in order: a mark by its number, a copy by the mark it may begin after.
    """

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def record_event(self) -> int:
        """Return the number of the mark."""
        with self._lock:
            self.told.append(("mark", len(self.told)))
            return len(self.told) - 1

    def copy_async(self, source: torch.Tensor, target: torch.Tensor, after: int) -> Callable[[], None]:
        """Spoil the target; return what copies."""
        with self._lock:
            self.told.append(("copy", after))
        target.fill_(-1)
        left = [lambda: target.copy_(source)]
        return lambda: left.pop()() if left else None

    def wait_event(self, event: Callable[[], None]) -> None:
        """Copy now."""
        event()

    def order_after(self, event: Callable[[], None]) -> None:
        """Copy now: what the caller computes next is computed at once."""
        event()
