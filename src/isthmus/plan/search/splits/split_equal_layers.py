"""`split_equal_layers`: split equal layers over unequal stages; exact, in about 0.1 ms.

The problem of `split_layers` without an all-reduce, for models whose layers are all equal: a stage's time
then depends on its number of layers only. Under a bound on the slowest stage, the least sum gives layers one
by one to the stage whose time grows least (exact if times are convex in the number of layers), else it comes
from dynamic programming over numbers of layers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Seconds of a stage by its number of layers; equal stages share one object."""

    # `seconds[n - 1]` with `n` layers, non-decreasing, as far as they fit in memory.
    seconds: tuple[float, ...]

    @property
    def hull(self) -> LayerTimes:
        """The convex lower envelope of these times (`self` if they are convex)."""
        return self._envelope or self

    @cached_property
    def _envelope(self) -> LayerTimes | None:
        """The envelope, None if it is these times: a reference to `self` would be a cycle."""
        points: list[tuple[int, float]] = []
        for n, y in enumerate(self.seconds):
            while len(points) > 1 and _is_above(points[-2], points[-1], (n, y)):
                points.pop()
            points.append((n, y))
        if len(points) == len(self.seconds):
            return None
        values = [y for _, y in points[:1]]
        for (n0, y0), (n1, y1) in itertools.pairwise(points):
            values += [y0 + (y1 - y0) * (n - n0) / (n1 - n0) for n in range(n0 + 1, n1 + 1)]
        return LayerTimes(tuple(values))


def _is_above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Return whether `b` lies above the line from `a` to `c` by more than rounding."""
    return (b[1] - a[1]) * (c[0] - b[0]) > (c[1] - b[1]) * (b[0] - a[0]) * (1 + 1e-12) + 1e-15


@dataclass(frozen=True)
class LayerCounts:
    """A split of equal layers."""

    # Number of layers per stage.
    counts: tuple[int, ...]
    # Sum of stage times.
    sum_s: float
    # Time of the slowest stage.
    slowest_s: float


def split_lower_bounds(stages: Sequence[LayerTimes], num_layers: int) -> tuple[float, float] | None:
    """Return lower bounds on the sum of stage times and on the slowest stage; None if no split fits.

    The two bounds may stem from different splits.
    """
    lowest_s = _least_slowest_s(stages, num_layers)
    if lowest_s is None:
        return None
    return _split_greedily([one.hull for one in stages], num_layers, math.inf).sum_s, lowest_s


def _least_slowest_s(stages: Sequence[LayerTimes], num_layers: int) -> float | None:
    """Return the least bound on all stages under which they hold all layers, None if there is none."""
    if len(stages) > num_layers or not all(one.seconds for one in stages):
        return None
    if sum(len(one.seconds) for one in stages) < num_layers:
        return None
    kinds = {id(one): one for one in stages}.values()
    least_s = max(one.seconds[0] for one in stages)
    bounds = sorted({s for one in kinds for s in one.seconds if s >= least_s})

    def holds(bound_s: float) -> bool:
        room = {id(one): bisect_right(one.seconds, bound_s) for one in kinds}
        return sum(room[id(one)] for one in stages) >= num_layers

    lowest = bisect_left(bounds, True, key=holds)
    return bounds[lowest] if lowest < len(bounds) else None


def split_equal_layers(stages: Sequence[LayerTimes], num_layers: int, micro_batches: int) -> LayerCounts | None:
    """Return the split of least (sum + (micro_batches - 1) x slowest), or None if none fits in memory.

    Every stage takes at least one layer. Ties are broken deterministically.
    """
    lowest_s = _least_slowest_s(stages, num_layers)
    if lowest_s is None:
        return None
    # Step 1: list the candidate bounds on the slowest stage.
    kinds = {id(one): one for one in stages}.values()
    bounds = sorted({s for one in kinds for s in one.seconds if s >= lowest_s})
    hulls = [one.hull for one in stages]
    convex = all(one.hull is one for one in kinds)
    fill, repeats = (_split_greedily if convex else _split_dynamically), micro_batches - 1
    free_s = _split_greedily(hulls, num_layers, math.inf).sum_s
    # Step 2: minimise the sum under each bound, smallest first, until no larger one can win.
    best: LayerCounts | None = None
    best_s = math.inf
    for bound_s in bounds:
        if free_s + repeats * bound_s >= best_s:
            break
        if not convex and best is not None:  # lower bound with this as the slowest stage
            hull_s = _split_greedily(hulls, num_layers, bound_s).sum_s
            if hull_s + repeats * bound_s >= best_s:
                continue
        found = fill(stages, num_layers, bound_s)
        total_s = found.sum_s + repeats * found.slowest_s
        if total_s < best_s:
            best, best_s = found, total_s
        if found.sum_s <= free_s * (1 + 1e-12):
            break
    return best


def _split_greedily(stages: Sequence[LayerTimes], num_layers: int, bound_s: float) -> LayerCounts:
    """Give each stage one layer, then each further layer to the stage where it costs least (convex times)."""
    counts = [1] * len(stages)
    steps = []
    for index, one in enumerate(stages):
        if len(one.seconds) > 1 and one.seconds[1] <= bound_s:
            steps.append((one.seconds[1] - one.seconds[0], index))
    heapq.heapify(steps)
    for _ in range(num_layers - len(stages)):
        _, index = steps[0]
        counts[index] += 1
        seconds, count = stages[index].seconds, counts[index]
        if count < len(seconds) and seconds[count] <= bound_s:
            heapq.heapreplace(steps, (seconds[count] - seconds[count - 1], index))
        else:
            heapq.heappop(steps)
    return _make_counts(stages, counts)


def _split_dynamically(stages: Sequence[LayerTimes], num_layers: int, bound_s: float) -> LayerCounts:
    """Return the split of least sum by dynamic programming over the unused capacity of the stages.

    A tight bound leaves little unused capacity, which makes this fast.
    """
    capacities = [min(bisect_right(one.seconds, bound_s), num_layers) for one in stages]
    spare = sum(capacities) - num_layers
    least = [0.0] + [math.inf] * spare
    left: list[list[int]] = []
    for one, room in zip(stages, capacities, strict=True):
        here, choice = [math.inf] * (spare + 1), [0] * (spare + 1)
        for before, sum_s in enumerate(least):
            if sum_s == math.inf:
                continue
            for unused in range(min(room - 1, spare - before) + 1):
                total_s = sum_s + one.seconds[room - unused - 1]
                if total_s < here[before + unused]:
                    here[before + unused], choice[before + unused] = total_s, unused
        least = here
        left.append(choice)
    counts, rest = [], spare
    for choice, room in zip(reversed(left), reversed(capacities), strict=True):
        counts.append(room - choice[rest])
        rest -= choice[rest]
    return _make_counts(stages, counts[::-1])


def _make_counts(stages: Sequence[LayerTimes], counts: Sequence[int]) -> LayerCounts:
    times = [one.seconds[count - 1] for one, count in zip(stages, counts, strict=True)]
    return LayerCounts(tuple(counts), sum(times), max(times))
