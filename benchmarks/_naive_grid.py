"""A planner in sixty lines, as a floor: a grid over places, tensor parallelism, stages and micro-batches.

Every order of every set of places, one tensor parallelism per place, up to `MAX_STAGES` stages in each, as
many replicas as there is room for, and layers in proportion to the speed of a stage, judged by Sailor's
simulator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks._sailor import Case, Place, Referee, SailorPlan, StageUse, Tables

MOST_STAGES = 8
MOST_PLACES = 2


def proportional(speeds: Sequence[float], layers: int) -> list[int] | None:
    """Return `layers` dealt by speed, at least one each; None where there are more stages than layers."""
    if len(speeds) > layers:
        return None
    shares = [layers * speed / sum(speeds) for speed in speeds]
    counts = [max(1, math.floor(share)) for share in shares]
    while sum(counts) != layers:
        step = 1 if sum(counts) < layers else -1
        ranked = [i for i in range(len(counts)) if counts[i] + step >= 1]
        counts[max(ranked, key=lambda i: step * (shares[i] - counts[i]))] += step
    return counts


def grid(case: Case, tables: Tables) -> Iterator[tuple[float, SailorPlan]]:
    """Yield (seconds below which it cannot end, plan)."""
    places = [place for place, count in case.chips.items() if count]
    orders = [
        order for size in range(1, min(len(places), MOST_PLACES) + 1) for order in itertools.permutations(places, size)
    ]
    for size in tables.micro_batch_sizes(case.kinds):
        for order in orders:
            for tps in itertools.product((1, 2, 4), repeat=len(order)):
                yield from _chains(case, tables, size, tuple(zip(order, tps, strict=True)))


def _chains(
    case: Case, tables: Tables, size: int, cut: tuple[tuple[Place, int], ...]
) -> Iterator[tuple[float, SailorPlan]]:
    measured = [tables.times_of(place[0], size, tp) for place, tp in cut]
    if not all(measured):
        return
    inner = tables.num_layers - 2
    speeds = [1 / one.layer_s[2] for one in measured if one]
    for stages in itertools.product(range(1, MOST_STAGES + 1), repeat=len(cut)):
        dp = min(case.chips[place] // (tp * count) for (place, tp), count in zip(cut, stages, strict=True))
        dp = min(dp, case.samples // size)
        ends = [one for one, count in zip(cut, stages, strict=True) for _ in range(count)]
        each = [one for one, count in zip(speeds, stages, strict=True) for _ in range(count)]
        counts = proportional(each, inner)
        if not dp or counts is None:
            continue
        starts = [0, *itertools.accumulate(counts)]
        uses = []
        for index, end in enumerate(ends):
            first = 0 if index == 0 else starts[index] + 1
            last = inner + 2 if index == len(ends) - 1 else starts[index + 1] + 1
            uses.append(StageUse(tuple(range(first, last)), (end,) * dp))
        least_s = math.ceil(case.samples / (size * dp)) * max(n / s for n, s in zip(counts, each, strict=True))
        yield least_s, SailorPlan(size, (tuple(uses),))


def grid_plans(case: Case, tables: Tables, referee: Referee) -> list[dict[str, Any]]:
    """Return the best plan of the grid by Sailor's simulator, none where nothing fits."""
    best_s, best = math.inf, None
    for least_s, plan in sorted(grid(case, tables), key=lambda one: one[0]):
        if least_s >= best_s:
            break
        written = plan.as_dict()
        time_s = referee.iteration_s(written)
        if time_s < best_s:
            best_s, best = time_s, written
    return [best] if best else []
