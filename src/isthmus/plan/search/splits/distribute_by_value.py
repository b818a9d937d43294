"""`distribute_by_value`: distribute micro-batches over unlike replicas so that a step has the least value.

A step of `T` seconds is worth per_s x T, and each micro-batch on a replica the energy that it draws there. The later
the end, the more micro-batches the replicas that draw least can take. For an end `T` it is best to fill replicas in the
order of their energy; the ends to try are those at which some replica finishes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming, distribute_micro_batches

MAX_ENDS = 512
"""Most ends to try; of more, every n-th."""


def distribute_by_value(
    timings: Sequence[ReplicaTiming], micro_batch_values: Sequence[float], total: int, per_s: float
) -> tuple[tuple[int, ...], ...] | None:
    """Return the micro-batches of every replica of every timing, `total` in all, with the least value.

    `micro_batch_values`, (timings,), are those of one micro-batch. Every replica takes at least one; None if there are
    more replicas than micro-batches.
    """
    fastest = distribute_micro_batches(timings, total)
    if fastest is None or len(set(micro_batch_values)) == 1:
        return fastest

    def value(counts: Sequence[Sequence[int]]) -> float:
        end_s = max(one.end_s(max(row)) for one, row in zip(timings, counts, strict=True))
        passes = zip(micro_batch_values, counts, strict=True)
        return per_s * end_s + sum(each * sum(row) for each, row in passes)

    first_s = max(one.end_s(max(row)) for one, row in zip(timings, fastest, strict=True))
    best, best_value = fastest, value(fastest)
    floor = total * min(micro_batch_values)
    ends = sorted({one.end_s(count) for one in timings for count in range(1, total + 1)})
    later = [end_s for end_s in ends if end_s >= first_s * (1 - 1e-12)]
    for end_s in later[:: -(-len(later) // MAX_ENDS)]:
        if per_s * end_s + floor >= best_value:
            break
        counts = _fill(timings, micro_batch_values, total, end_s)
        if counts is not None and value(counts) < best_value:
            best, best_value = counts, value(counts)
    return best


def _fill(
    timings: Sequence[ReplicaTiming], values: Sequence[float], total: int, end_s: float
) -> tuple[tuple[int, ...], ...] | None:
    """Return the cheapest distribution that ends by `end_s`: one for each replica, then those that cost least."""
    given = [one.num_replicas for one in timings]
    left = total - sum(given)
    for index in sorted(range(len(timings)), key=lambda i: (values[i], i)):
        one = timings[index]
        room = one.num_replicas * (one.micro_batches_within(end_s) - 1)
        more = min(left, max(0, room))
        given[index] += more
        left -= more
    if left:
        return None
    return tuple(_even(count, one.num_replicas) for count, one in zip(given, timings, strict=True))


def _even(count: int, replicas: int) -> tuple[int, ...]:
    each, over = math.floor(count / replicas), count % replicas
    return (each + 1,) * over + (each,) * (replicas - over)
