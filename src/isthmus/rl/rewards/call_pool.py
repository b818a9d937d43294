"""`CallPool`: things of which each serves one call at a time, so that as many calls as there are things run at once."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

Member = TypeVar("Member")


class CallPool(Generic[Member]):
    """Any thread may `borrow` one of `members`; a call waits while all are in use.

    The one that was used last is used first, so that processes start as they are needed: a second one only where two
    calls wait.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self._free: queue.LifoQueue[Member] = queue.LifoQueue()
        for one in reversed(self.members):
            self._free.put(one)

    @contextmanager
    def borrow(self) -> Iterator[Member]:
        """Give a member that no other call has."""
        one = self._free.get()
        try:
            yield one
        finally:
            self._free.put(one)
