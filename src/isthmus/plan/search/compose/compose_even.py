"""`compose_even`: as `compose`, but all replicas take equally many micro-batches.

Most frameworks distribute samples equally over replicas, whatever their speed. With `m` micro-batches each,
all groups together need `total / m` replicas, and each group offers more of them the later they may finish.
The least end is found for every `m` that a number of replicas implies; lazily exact as `compose`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

from isthmus.plan.search.compose.compose import Cutter, Option, Options
from isthmus.plan.search.splits.deal_micro_batches import Pace


def compose_even(
    islands: Sequence[Options], total: int, cut: Cutter, give_up_s: float = math.inf
) -> tuple[float, tuple[Option, ...]] | float:
    """Return the seconds and the option per group with which `total` micro-batches finish first.

    As in `compose`, every group takes part; if no combination is feasible, or none finishes before
    `give_up_s`, only the proven lower bound is returned, and infeasible options are removed.
    """
    if not all(islands):
        return math.inf
    most = sum(max(one.shape.dp for one in options) for options in islands)
    numbers = {-(-total // replicas) for replicas in range(1, most + 1)}
    bounds = sorted((_least(islands, total, m)[0], m) for m in numbers)
    best, end_s = None, give_up_s
    for bound_s, m in bounds:
        if bound_s >= end_s:
            break
        while True:
            time_s, chosen = _least(islands, total, m)
            inexact = {id(one): (one, options) for one, options in chosen if not one.cut}
            if time_s >= end_s:
                break
            if not inexact:
                best, end_s = tuple(one for one, _ in chosen), time_s
                break
            for one, options in inexact.values():
                if not cut(one, m):
                    options.lose(one)
    return bounds[0][0] if best is None else (end_s, best)


def deal_evenly(paces: Sequence[Pace], total: int) -> tuple[tuple[int, ...], ...] | None:
    """Return the micro-batches of every replica of every timing, no two differing by more than one.

    The remainder goes to the replicas that finish first. None if there are more replicas than micro-batches.
    """
    copies = sum(one.copies for one in paces)
    if not paces or copies > total:
        return None
    each, over = divmod(total, copies)
    counts = [[each] * one.copies for one in paces]
    for index in sorted(range(len(paces)), key=lambda i: paces[i].end_s(each + 1)):
        more = min(over, paces[index].copies)
        counts[index][:more] = [each + 1] * more
        over -= more
    return tuple(tuple(row) for row in counts)


def _least(
    islands: Sequence[Options], total: int, each: int
) -> tuple[float, tuple[tuple[Option, Options], ...]]:
    """Return the least end, and its options, of replicas with `each` micro-batches that together take
    `total`.
    """
    if not all(islands):
        return math.inf, ()
    kinds = {id(options): _steps(options, each) for options in islands}
    ends = sorted({end_s for steps in kinds.values() for end_s, _ in steps})

    def taken(time_s: float) -> list[Option] | None:
        found = []
        for options in islands:
            steps = kinds[id(options)]
            place = bisect_right(steps, time_s, key=lambda step: step[0])
            if place == 0:
                return None
            found.append(steps[place - 1][1])
        return found if sum(one.shape.dp for one in found) * each >= total else None

    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if taken(ends[middle]) else (middle + 1, high)
    if low == len(ends):
        return math.inf, ()
    return ends[low], tuple(zip(taken(ends[low]) or (), islands, strict=True))


def _steps(options: Options, each: int) -> list[tuple[float, Option]]:
    """Return (end, option) by ascending end, keeping those where a later end brings more replicas."""
    ordered = sorted(
        ((one.cost.first_s + (each - 1) * one.cost.pace_s, one) for one in options),
        key=lambda pair: (pair[0], -pair[1].shape.dp),
    )
    most = itertools.accumulate((one.shape.dp for _, one in ordered), max, initial=0)
    return [pair for pair, before in zip(ordered, most, strict=False) if pair[1].shape.dp > before]
