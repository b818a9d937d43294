"""`refine_split`: move single layers between neighbouring stages while the simulated iteration gets shorter.

The closed-form estimate ignores contention between messages and waits for single micro-batches; the simulator
includes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from isthmus.plan.search.compose.plan_layout import PlacedPipeline, PlanLayout
from isthmus.plan.search.finish.write_plan import ScoredPlan

MAX_EXHAUSTIVE_SPLITS = 24
"""Up to this many splits of a pipeline, all are tried."""

ScoreLayout = Callable[[PlanLayout], ScoredPlan | None]


def refine_split(
    best: ScoredPlan, score: ScoreLayout, moves: int, value_of: Callable[[ScoredPlan], float] = attrgetter("time_s")
) -> ScoredPlan:
    """Return the best by `value_of` of `best` and its single-layer moves, simulating at most `moves` of them."""
    improved = True
    while improved and moves > 0:
        improved = False
        for layout in _neighbours(best.layout):
            if moves <= 0:
                break
            moves -= 1
            one = score(layout)
            if one is not None and value_of(one) < value_of(best) * (1 - 1e-9):
                best, improved = one, True
                break
    return best


def _neighbours(layout: PlanLayout) -> Iterator[PlanLayout]:
    """Yield the feasible layouts that differ by one layer across one stage boundary; with few splits, all."""
    for index, pipeline in enumerate(layout.pipelines):
        for moved in _all_splits(pipeline) if _has_few_splits(pipeline) else _single_moves(pipeline):
            if moved is not None and moved.split.layers != pipeline.split.layers:
                yield replace(layout, pipelines=(*layout.pipelines[:index], moved, *layout.pipelines[index + 1 :]))


def _has_few_splits(pipeline: PlacedPipeline) -> bool:
    return (
        math.comb(pipeline.shape.workload.profile.num_layers - 1, pipeline.shape.num_stages - 1)
        <= MAX_EXHAUSTIVE_SPLITS
    )


def _all_splits(pipeline: PlacedPipeline) -> Iterator[PlacedPipeline | None]:
    layers = pipeline.shape.workload.profile.num_layers
    for cuts in itertools.combinations(range(1, layers), pipeline.shape.num_stages - 1):
        yield _with_layers(pipeline, list(itertools.pairwise((0, *cuts, layers))))


def _single_moves(pipeline: PlacedPipeline) -> Iterator[PlacedPipeline | None]:
    for boundary in range(pipeline.shape.num_stages - 1):
        for step in (-1, 1):
            yield _move_layer(pipeline, boundary, step)


def _move_layer(pipeline: PlacedPipeline, boundary: int, step: int) -> PlacedPipeline | None:
    layers = list(pipeline.split.layers)
    (first, end), (_, last) = layers[boundary], layers[boundary + 1]
    if not first < end + step < last:
        return None
    layers[boundary], layers[boundary + 1] = (first, end + step), (end + step, last)
    return _with_layers(pipeline, layers)


def _with_layers(pipeline: PlacedPipeline, layers: Sequence[tuple[int, int]]) -> PlacedPipeline | None:
    chain = pipeline.shape.with_layers(layers, max(pipeline.micro_batch_counts))
    return None if chain is None else PlacedPipeline(pipeline.shape, chain, pipeline.micro_batch_counts)
