"""Min-plus sums of curves: the least cost of n pieces over several places, from the least cost in each."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from isthmus.site.topology.gang_cost import INFEASIBLE

Curve: TypeAlias = npt.NDArray[np.int64]
"""Costs of 0, 1, ... pieces, shape [pieces + 1]; `INFEASIBLE` where none is possible."""


def empty_curve(most: int) -> Curve:
    """Return the curve of no place, up to `most` pieces: only none can be placed."""
    made = np.full(most + 1, INFEASIBLE, dtype=np.int64)
    made[0] = 0
    return made


def add_curve(total: Curve, curve: Curve) -> Curve:
    """Return the min-plus sum of `total` and one more curve, as long as `total`."""
    made = total.copy()
    for count in range(1, min(len(curve), len(total))):
        if curve[count] < INFEASIBLE:
            lower(made, total, count, int(curve[count]))
    return made


def add_equal(total: Curve, curve: Curve, num: int) -> Curve:
    """Return the min-plus sum of `total` and `num` equal curves, of which at most one is used in part."""
    holds = len(curve) - 1
    return add_curve(add_copies(total, holds, int(curve[holds]), num - 1), curve)


def add_copies(total: Curve, holds: int, each: int, num: int) -> Curve:
    """Return `total` with up to `num` copies of `holds` pieces that cost `each`, by doubling."""
    made, size = total, 1
    num = min(num, (len(total) - 1) // holds)
    while num > 0:
        size = min(size, num)
        after = made.copy()
        lower(after, made, size * holds, size * each)
        made, num, size = after, num - size, size * 2
    return made


def find_copies(before: Curve, count: int, holds: int, each: int, num: int, target: int) -> int | None:
    """Return how many of up to `num` copies lead from `before` to cost `target` at `count`, or None."""
    copies = np.arange(min(num, count // holds) + 1)
    found = np.flatnonzero(before[count - copies * holds] + copies * each == target)
    return int(found[0]) if len(found) else None


def lower(target: Curve, source: Curve, count: int, cost: int) -> None:
    """Lower `target` to `source` with `count` more pieces at `cost`."""
    if 0 < count < len(target):
        np.minimum(target[count:], np.minimum(source[:-count] + cost, INFEASIBLE), out=target[count:])
