"""`split_layers`: cut a chain of layers over unlike stages so that the slowest stage is as fast as it can be.

Exact for times and memory that grow with the number of layers: a bound on the slowest stage can be met if and
only if giving every stage, first to last, as many layers as the bound and its memory allow uses up all
layers. The smallest such bound is found by bisection over the times that single stages can take.
"""

from __future__ import annotations

from collections.abc import Callable

StageCost = Callable[[int, int, int], float]
"""(stage, first layer, last layer exclusive) -> seconds per micro-batch."""
StageFits = Callable[[int, int, int], bool]
"""(stage, first layer, last layer exclusive) -> whether the stage's memory holds it."""


def split_layers(
    num_layers: int, num_stages: int, time_s: StageCost, fits: StageFits
) -> tuple[tuple[int, int], ...] | None:
    """Return `[first, last)` per stage with the smallest slowest stage, or None where memory admits no split.

    Each stage gets at least one layer. `time_s` and `fits` must be monotone in the last layer for a given
    first.
    """
    if num_stages > num_layers:
        return None
    best = _fill(num_layers, num_stages, float("inf"), time_s, fits)
    if best is None:
        return None
    low_s, high_s = 0.0, _slowest(best, time_s)
    while high_s - low_s > 1e-4 * high_s:
        bound_s = (low_s + high_s) / 2
        split = _fill(num_layers, num_stages, bound_s, time_s, fits)
        if split is None:
            low_s = bound_s
        else:
            best, high_s = split, min(bound_s, _slowest(split, time_s))
    return best


def _slowest(split: tuple[tuple[int, int], ...], time_s: StageCost) -> float:
    return max(time_s(stage, first, last) for stage, (first, last) in enumerate(split))


def _fill(
    num_layers: int, num_stages: int, bound_s: float, time_s: StageCost, fits: StageFits
) -> tuple[tuple[int, int], ...] | None:
    split, first = [], 0
    for stage in range(num_stages):
        longest = num_layers - (num_stages - stage - 1)
        shortest = longest if stage == num_stages - 1 else first + 1
        low, high = shortest - 1, longest
        while low < high:  # the largest `last` that is within the bound and fits
            last = (low + high + 1) // 2
            if time_s(stage, first, last) <= bound_s and fits(stage, first, last):
                low = last
            else:
                high = last - 1
        if low < shortest:
            return None
        split.append((first, low))
        first = low
    return tuple(split)
