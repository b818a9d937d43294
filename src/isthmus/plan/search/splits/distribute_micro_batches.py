"""`distribute_micro_batches`: distribute micro-batches over unequal replicas, so that all finish together.

Equations (3) and (4) of the heterogeneous-training report with one micro-batch size: samples in proportion to
speed (`distribute_samples.py` covers several sizes). A replica that takes `m` micro-batches finishes after first +
(m - 1) x pace. The least time in which all can be distributed is bisected, and exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaTiming:
    """Timing of `num_replicas` equal replicas."""

    # Seconds until the first micro-batch is through.
    first_s: float
    # Seconds of each further one.
    interval_s: float
    num_replicas: int

    def micro_batches_within(self, time_s: float) -> int:
        """Return the micro-batches that one replica finishes within `time_s`."""
        if time_s < self.first_s:
            return 0
        if self.interval_s <= 0:
            return 1 << 40
        return 1 + math.floor((time_s - self.first_s) / self.interval_s * (1 + 1e-12) + 1e-9)

    def end_s(self, count: int) -> float:
        """Return the time at which a replica finishes `count` micro-batches."""
        return self.first_s + (count - 1) * self.interval_s if count else 0.0


def distribute_micro_batches(timings: Sequence[ReplicaTiming], total: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the micro-batches of every replica of every timing, `total` in all, with the earliest end.

    Every replica takes at least one; None if there are more replicas than micro-batches. Equal replicas
    differ by at most one.
    """
    if not timings or sum(one.num_replicas for one in timings) > total:
        return None
    if len({(one.first_s, one.interval_s) for one in timings}) == 1:
        return _equal_shares([one.num_replicas for one in timings], total)
    # Step 1: give each replica what it finishes by the earliest end.
    end_s = _earliest_s(timings, total)
    counts = [[max(1, one.micro_batches_within(end_s))] * one.num_replicas for one in timings]
    # Step 2: remove the excess.
    excess = sum(map(sum, counts)) - total
    while excess > 0:  # take from the replicas that finish last
        index = max(
            (i for i in range(len(timings)) if counts[i][-1] > 1 or counts[i][0] > 1),
            key=lambda i: (timings[i].end_s(max(counts[i])), -i),
        )
        row = counts[index]
        highest = max(row)
        for place in reversed(range(len(row))):
            if excess and row[place] == highest:
                row[place] -= 1
                excess -= 1
    return tuple(tuple(row) for row in counts)


def _equal_shares(replicas: Sequence[int], total: int) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of replicas of equal timing; the last ones of the first timings take one less."""
    each, found = -(-total // sum(replicas)), list[tuple[int, ...]]()
    excess = each * sum(replicas) - total
    for count in replicas:
        fewer = min(excess, count)
        excess -= fewer
        found.append((each,) * (count - fewer) + (each - 1,) * fewer)
    return tuple(found)


def _earliest_s(timings: Sequence[ReplicaTiming], total: int) -> float:
    """Return the least time within which `total` micro-batches finish, at least one per replica."""
    low_s = max(one.first_s for one in timings)

    def dealt(time_s: float) -> int:
        return sum(one.num_replicas * one.micro_batches_within(time_s) for one in timings)

    if dealt(low_s) >= total:
        return low_s
    high_s = min(one.end_s(-(-total // one.num_replicas)) for one in timings)
    high_s = max(high_s, low_s)
    for _ in range(100):
        middle_s = (low_s + high_s) / 2
        if middle_s in (low_s, high_s):
            break
        low_s, high_s = (low_s, middle_s) if dealt(middle_s) >= total else (middle_s, high_s)
    return high_s
