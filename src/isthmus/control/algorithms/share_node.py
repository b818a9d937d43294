"""`ShareNode`: an account of fair share with those below it, which take turns by what each has used of its weight.

At each node the account that has used least of its weight goes first, and the same again below: what an account leaves
goes to those beside it, as in hierarchical fair queueing (Bennett, Zhang 1996) and in the fair tree of Slurm (SchedMD
2014). Accounts of equal tags go by their next job, those with others below them by the first of all their jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from sortedcontainers import SortedList

Key = tuple[int, float, int]
"""(priority rank, submission time in s, job number): the order of one user's jobs; numbers are unique."""

HELD_CHIP_S = 3600.0
"""Seconds that a held chip counts in advance, and chip-seconds that a job ahead of another one of its user counts."""


@dataclass(slots=True, kw_only=True)
class ShareNode:
    """An account with waiting jobs of its own (`queue`), or those of the accounts below it by name."""

    weight: float = 1.0
    # What it has used, and the chips that it holds, with all below it.
    used_chip_s: float = 0.0
    num_chips: int = 0
    queue: Annotated[SortedList, Key] = field(default_factory=SortedList)
    children: dict[str, ShareNode] = field(default_factory=dict)

    def tag(self, num_ahead: int) -> float:
        """Return the tag of its job with `num_ahead` of its jobs before it: the lowest goes first."""
        return (self.used_chip_s + HELD_CHIP_S * (self.num_chips + num_ahead)) / self.weight

    def keys(self, rank: int) -> Iterator[Key]:
        """Yield the keys of its jobs of a priority rank, first to start first."""
        if not self.children:
            yield from self.queue.irange((rank,), (rank + 1,))
            return
        heap = []
        for child in self.children.values():
            keys = child.keys(rank)
            if (key := next(keys, None)) is not None:
                head = child.first(rank) if child.children else None
                heap.append((child.tag(0), head or key, 0, key, head, child, keys))
        heapq.heapify(heap)
        while heap:
            _, _, num_ahead, key, head, child, keys = heap[0]
            yield key
            following = next(keys, None)
            if following is None:
                heapq.heappop(heap)
            else:
                tag, tie = child.tag(num_ahead + 1), head or following
                heapq.heapreplace(heap, (tag, tie, num_ahead + 1, following, head, child, keys))

    def first(self, rank: int) -> Key | None:
        """Return the key of a rank that sorts first, of its jobs and those below it; None without one."""
        if self.children:
            return min((key for one in self.children.values() if (key := one.first(rank)) is not None), default=None)
        return next(self.queue.irange((rank,), (rank + 1,)), None)

    def num_before(self, rank: int, other: tuple[float, Key]) -> int:
        """Return how many of its jobs of a rank precede the job of an account beside it, given by its tag and key."""
        low, high = 0, self.count(rank)
        while low < high:
            middle = (low + high) // 2
            if (self.tag(middle), self._tie_at(rank, middle)) < other:
                low = middle + 1
            else:
                high = middle
        return low

    def count(self, rank: int) -> int:
        """Return the number of its jobs of a rank, with those below it."""
        if self.children:
            return sum(one.count(rank) for one in self.children.values())
        return int(self.queue.bisect_left((rank + 1,)) - self.queue.bisect_left((rank,)))

    def _tie_at(self, rank: int, place: int) -> Key:
        first = self.first(rank) if self.children else None
        found: Key = first or self.queue[self.queue.bisect_left((rank,)) + place]
        return found
