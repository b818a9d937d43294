"""`compose_equal`: as `compose`, but all replicas take equally many micro-batches.

Most frameworks distribute samples equally over replicas, whatever their speed. With `m` micro-batches each,
all groups together need `total / m` replicas, and each group offers more of them the later they may finish.
The least end is found for every `m` that a number of replicas implies; lazily exact as `compose`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

from isthmus.plan.search.compose.compose_groups import OptionEvaluator, PipelineOption, PipelineOptions
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming


def compose_equal(
    replica_groups: Sequence[PipelineOptions],
    total: int,
    evaluate: OptionEvaluator,
    cutoff_s: float = math.inf,
) -> tuple[float, tuple[PipelineOption, ...]] | float:
    """Return the seconds and the option per group with which `total` micro-batches finish first.

    As in `compose`, every group takes part; if no combination is feasible, or none finishes before
    `cutoff_s`, only the proven lower bound is returned, and infeasible options are removed.
    """
    if not all(replica_groups):
        return math.inf
    most = sum(max(one.shape.dp for one in options) for options in replica_groups)
    numbers = {-(-total // replicas) for replicas in range(1, most + 1)}
    bounds = sorted((_least_end(replica_groups, total, m)[0], m) for m in numbers)
    best, end_s = None, cutoff_s
    for bound_s, m in bounds:
        if bound_s >= end_s:
            break
        while True:
            time_s, chosen = _least_end(replica_groups, total, m)
            inexact = {id(one): (one, options) for one, options in chosen if not one.exact}
            if time_s >= end_s:
                break
            if not inexact:
                best, end_s = tuple(one for one, _ in chosen), time_s
                break
            for one, options in inexact.values():
                if not evaluate(one, m):
                    options.remove_infeasible(one)
    return bounds[0][0] if best is None else (end_s, best)


def distribute_equally(timings: Sequence[ReplicaTiming], total: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the micro-batches of every replica of every timing, no two differing by more than one.

    The remainder goes to the replicas that finish first. None if there are more replicas than micro-batches.
    """
    copies = sum(one.num_replicas for one in timings)
    if not timings or copies > total:
        return None
    each, over = divmod(total, copies)
    counts = [[each] * one.num_replicas for one in timings]
    for index in sorted(range(len(timings)), key=lambda i: timings[i].end_s(each + 1)):
        more = min(over, timings[index].num_replicas)
        counts[index][:more] = [each + 1] * more
        over -= more
    return tuple(tuple(row) for row in counts)


def _least_end(
    replica_groups: Sequence[PipelineOptions], total: int, micro_batches: int
) -> tuple[float, tuple[tuple[PipelineOption, PipelineOptions], ...]]:
    """Return the least end, and its options, of replicas with `micro_batches` micro-batches that together take
    `total`.
    """
    if not all(replica_groups):
        return math.inf, ()
    kinds = {id(options): _end_steps(options, micro_batches) for options in replica_groups}
    ends = sorted({end_s for steps in kinds.values() for end_s, _ in steps})

    def taken(time_s: float) -> list[PipelineOption] | None:
        found = []
        for options in replica_groups:
            steps = kinds[id(options)]
            place = bisect_right(steps, time_s, key=lambda step: step[0])
            if place == 0:
                return None
            found.append(steps[place - 1][1])
        return found if sum(one.shape.dp for one in found) * micro_batches >= total else None

    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if taken(ends[middle]) else (middle + 1, high)
    if low == len(ends):
        return math.inf, ()
    return ends[low], tuple(zip(taken(ends[low]) or (), replica_groups, strict=True))


def _end_steps(options: PipelineOptions, micro_batches: int) -> list[tuple[float, PipelineOption]]:
    """Return (end, option) by ascending end, keeping those where a later end brings more replicas."""
    ordered = sorted(
        ((one.cost.first_s + (micro_batches - 1) * one.cost.interval_s, one) for one in options),
        key=lambda pair: (pair[0], -pair[1].shape.dp),
    )
    most = itertools.accumulate((one.shape.dp for _, one in ordered), max, initial=0)
    return [pair for pair, before in zip(ordered, most, strict=False) if pair[1].shape.dp > before]
