"""`split_layers`: split layers over unequal stages exactly, for the least time of a whole iteration.

Algorithm 2 of the heterogeneous-training report as `docs/design/planner.md` reads it: over all contiguous
splits, minimise (sum of stage times) + (micro-batches - 1) x (slowest stage) + (largest all-reduce). For
given bounds on the slowest stage and on the largest all-reduce, dynamic programming over (stage, first layer)
finds the least sum. The bounds are enumerated: the slowest stage's upwards from the least feasible one until
no larger one can win, the all-reduce's downwards.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

RangeTable = Sequence[Sequence[tuple[int, float]]]
"""By first layer: (last, seconds) of layers `[first, last)` for ascending `last`.

As far as they fit in memory. Seconds must not decrease with `last`.
"""

RangeSeconds = Sequence[Sequence[float]]
"""`times[first][last]`: seconds of layers `[first, last)`. Shape: [num_layers][num_layers + 1]."""


@dataclass(frozen=True)
class LayerSplit:
    """Layers `[first, last)` per stage, and the closed-form seconds of the iteration."""

    layers: tuple[tuple[int, int], ...]
    total_s: float


def split_layers(
    num_layers: int,
    times_s: Sequence[RangeTable],
    micro_batches: int,
    reduce_s: Sequence[RangeSeconds] | None = None,
) -> LayerSplit | None:
    """Return the best split of `num_layers` over `len(times_s)` stages, or None if none fits.

    `times_s[stage]` holds the seconds of a micro-batch, both passes; equal stages may share one table.
    `reduce_s[stage]` holds those of the stage's all-reduce (None: no all-reduce). Every stage gets at least
    one layer. Ties are broken deterministically.
    """
    if not 1 <= len(times_s) <= num_layers:
        return None
    problem = _SplitProblem(num_layers, times_s, micro_batches)
    if reduce_s is None:
        return problem.best_split(None, math.inf)
    best: LayerSplit | None = None
    below = math.inf
    while (found := problem.best_split(reduce_s, below)) is not None:
        below = max(reduce_s[stage][first][last] for stage, (first, last) in enumerate(found.layers))
        total_s = found.total_s + below
        if best is None or total_s < best.total_s:
            best = LayerSplit(found.layers, total_s)
        if found.total_s >= best.total_s:
            break  # a smaller all-reduce only costs more stage time
    return best


@dataclass
class _SplitProblem:
    num_layers: int
    times_s: Sequence[RangeTable]
    micro_batches: int

    def best_split(self, reduce_s: Sequence[RangeSeconds] | None, below_s: float) -> LayerSplit | None:
        """Return the split of least (sum + (B - 1) x slowest) with all all-reduces below `below_s`."""
        rows = self.times_s if reduce_s is None else self._within_reduce_bound(reduce_s, below_s)
        bounds = sorted({t for row in {id(r): r for r in rows}.values() for line in row for _, t in line})
        lowest = bisect_left(bounds, True, key=lambda bound: self._is_reachable(rows, bound))
        if lowest == len(bounds):
            return None
        free = self._least_sum(rows, math.inf)
        repeats, best = self.micro_batches - 1, None
        for bound in bounds[lowest:]:
            if best is not None and free[0] + repeats * bound >= best.total_s:
                break
            total, layers = self._least_sum(rows, bound)
            slowest = max(dict(rows[stage][a])[b] for stage, (a, b) in enumerate(layers))
            if best is None or total + repeats * slowest < best.total_s:
                best = LayerSplit(layers, total + repeats * slowest)
            if total <= free[0]:
                break
        return best

    def _within_reduce_bound(self, reduce_s: Sequence[RangeSeconds], below_s: float) -> list[RangeTable]:
        """Return (last, seconds) per stage and first layer where the all-reduce stays below `below_s`."""
        known: dict[tuple[int, int], RangeTable] = {}
        rows = []
        for times, reduce in zip(self.times_s, reduce_s, strict=True):
            key = (id(times), id(reduce))
            if key not in known:
                known[key] = [
                    [one for one in line if reduce[first][one[0]] < below_s] for first, line in enumerate(times)
                ]
            rows.append(known[key])
        return rows

    def _is_reachable(self, rows: Sequence[RangeTable], bound_s: float) -> bool:
        """Return whether some split keeps every stage within `bound_s`."""
        ends = {0}
        for row in rows:
            ends = {
                last for first in ends if first < self.num_layers for last, seconds in row[first] if seconds <= bound_s
            }
        return self.num_layers in ends

    def _least_sum(self, rows: Sequence[RangeTable], bound_s: float) -> tuple[float, tuple[tuple[int, int], ...]]:
        """Return the least sum of stage times within `bound_s`, and its split."""
        after = [math.inf] * self.num_layers + [0.0]
        chosen: list[list[int]] = []
        for row in reversed(rows):
            here, choice = [math.inf] * (self.num_layers + 1), [0] * (self.num_layers + 1)
            for first, line in enumerate(row):
                for last, seconds in line:
                    if seconds > bound_s:
                        break  # times do not fall with more layers
                    if seconds + after[last] < here[first]:
                        here[first], choice[first] = seconds + after[last], last
            after = here
            chosen.append(choice)
        layers, first = [], 0
        for choice in reversed(chosen):
            layers.append((first, choice[first]))
            first = choice[first]
        return after[0], tuple(layers)
