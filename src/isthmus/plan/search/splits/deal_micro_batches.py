"""`deal_micro_batches`: how many micro-batches each of many unlike replicas takes, so that all end together.

Equations (3) and (4) of the heterogeneous-training report with one size of micro-batch: samples in proportion
to speed (`deal_samples.py` has them with several). A replica that takes `m` micro-batches ends after
first + (m - 1) x pace; the least time by which all can be dealt is found by bisection, and is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """`copies` equal replicas: seconds until the first micro-batch is through, and of each further one."""

    first_s: float
    pace_s: float
    copies: int

    def taken(self, time_s: float) -> int:
        """Return the micro-batches that one replica can end within `time_s`."""
        if time_s < self.first_s:
            return 0
        if self.pace_s <= 0:
            return 1 << 40
        return 1 + math.floor((time_s - self.first_s) / self.pace_s * (1 + 1e-12) + 1e-9)

    def end_s(self, count: int) -> float:
        """Return when a replica that takes `count` micro-batches ends."""
        return self.first_s + (count - 1) * self.pace_s if count else 0.0


def deal_micro_batches(paces: Sequence[Pace], total: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the micro-batches of every copy of every pace, `total` in all, with the earliest end.

    Every replica takes at least one: None where there are more replicas than micro-batches. Copies differ by
    at most one.
    """
    if not paces or sum(one.copies for one in paces) > total:
        return None
    end_s = _earliest_s(paces, total)
    counts = [[max(1, one.taken(end_s))] * one.copies for one in paces]
    excess = sum(map(sum, counts)) - total
    while excess > 0:  # take from those that end last, a whole row of copies at a time
        index = max(
            (i for i in range(len(paces)) if counts[i][-1] > 1 or counts[i][0] > 1),
            key=lambda i: (paces[i].end_s(max(counts[i])), -i),
        )
        row = counts[index]
        highest = max(row)
        for place in reversed(range(len(row))):
            if excess and row[place] == highest:
                row[place] -= 1
                excess -= 1
    return tuple(tuple(row) for row in counts)


def _earliest_s(paces: Sequence[Pace], total: int) -> float:
    """Return the least time within which `total` micro-batches end, each replica having at least one."""
    low_s = max(one.first_s for one in paces)

    def dealt(time_s: float) -> int:
        return sum(one.copies * one.taken(time_s) for one in paces)

    if dealt(low_s) >= total:
        return low_s
    high_s = min(one.end_s(-(-total // one.copies)) for one in paces)
    high_s = max(high_s, low_s)
    for _ in range(100):
        middle_s = (low_s + high_s) / 2
        if middle_s in (low_s, high_s):
            break
        low_s, high_s = (low_s, middle_s) if dealt(middle_s) >= total else (middle_s, high_s)
    return high_s
