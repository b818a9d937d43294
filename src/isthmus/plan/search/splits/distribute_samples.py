"""`distribute_samples`: distribute samples over replicas with different micro-batch sizes, for the earliest end.

Equations (3) and (4) of the heterogeneous-training report: size x count in proportion to speed, summing to
the global batch. Sizes divide one another (powers of two), so filling large sizes first leaves the rest to
the small ones without loss, and the earliest end is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming, distribute_micro_batches


@dataclass(frozen=True)
class SizedReplicas:
    """Replicas with `micro_batch_size` samples per micro-batch."""

    timing: ReplicaTiming
    micro_batch_size: int


def distribute_samples(kinds: Sequence[SizedReplicas], samples: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the micro-batches of every replica of every kind, `samples` in all, with the earliest end.

    Every replica takes at least one; None if these exceed `samples`, or if the rest is not a multiple of the
    smallest size. Of any two sizes one divides the other.
    """
    least = min(one.micro_batch_size for one in kinds)
    rest = samples - sum(one.micro_batch_size * one.timing.num_replicas for one in kinds)
    if rest < 0 or rest % least:
        return None
    time_s = _earliest_s(kinds, rest)
    totals = _counts_by_size(kinds, rest, time_s) or {}
    found: list[tuple[int, ...]] = [()] * len(kinds)
    for size, more in totals.items():
        places = [place for place, one in enumerate(kinds) if one.micro_batch_size == size]
        paces = [kinds[place].timing for place in places]
        counts = distribute_micro_batches(paces, more + sum(one.num_replicas for one in paces))
        for place, count in zip(places, counts or (), strict=True):
            found[place] = count
    return tuple(found)


def _earliest_s(kinds: Sequence[SizedReplicas], rest: int) -> float:
    """Return the least time in which each replica finishes a micro-batch, and all together `rest`."""
    low_s = max(one.timing.first_s for one in kinds)
    if _counts_by_size(kinds, rest, low_s) is not None:
        return low_s
    least = min(kinds, key=lambda one: one.micro_batch_size)
    high_s = max(low_s, least.timing.end_s(rest // least.micro_batch_size + 1))
    for _ in range(100):
        middle_s = (low_s + high_s) / 2
        if middle_s in (low_s, high_s):
            break
        low_s, high_s = (low_s, middle_s) if _counts_by_size(kinds, rest, middle_s) is not None else (middle_s, high_s)
    return high_s


def _counts_by_size(kinds: Sequence[SizedReplicas], rest: int, time_s: float) -> dict[int, int] | None:
    """Return the additional micro-batches by size that make up `rest` within a time, None if none do."""
    found = {}
    for size in sorted({one.micro_batch_size for one in kinds}, reverse=True):
        most = sum(
            one.timing.num_replicas * (one.timing.micro_batches_within(time_s) - 1)
            for one in kinds
            if one.micro_batch_size == size
        )
        found[size] = min(most, rest // size)
        rest -= size * found[size]
    return None if rest else found
