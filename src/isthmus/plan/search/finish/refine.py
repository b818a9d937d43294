"""`refine`: move single layers between neighbouring stages while the simulated iteration gets shorter.

The closed-form estimate ignores contention between messages and waits for single micro-batches; the simulator
includes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from isthmus.plan.search.compose.layout import Layout, Row
from isthmus.plan.search.finish.write_plan import Scored

FEW_SPLITS = 24
"""Up to this many splits of a pipeline, all are tried."""

Score = Callable[[Layout], Scored]


def cells(layout: Layout) -> int:
    """Return the (stage, micro-batch) pairs that a simulation of a layout computes: its cost."""
    return sum(pipeline.shape.num_stages * sum(set(pipeline.counts)) for pipeline in layout.rows)


def refine(best: Scored, score: Score, moves: int) -> Scored:
    """Return the best of `best` and its single-layer moves, simulating at most `moves` of them."""
    improved = True
    while improved and moves > 0:
        improved = False
        for layout in _neighbours(best.layout):
            if moves <= 0:
                break
            moves -= 1
            one = score(layout)
            if one.time_s < best.time_s * (1 - 1e-9):
                best, improved = one, True
                break
    return best


def _neighbours(layout: Layout) -> Iterator[Layout]:
    """Yield the feasible layouts that differ by one layer across one stage boundary; with few splits, all."""
    for index, pipeline in enumerate(layout.rows):
        for moved in _every(pipeline) if _few(pipeline) else _steps(pipeline):
            if moved is not None and moved.chain.layers != pipeline.chain.layers:
                yield replace(layout, rows=(*layout.rows[:index], moved, *layout.rows[index + 1 :]))


def _few(row: Row) -> bool:
    return math.comb(row.shape.task.profile.num_layers - 1, row.shape.num_stages - 1) <= FEW_SPLITS


def _every(row: Row) -> Iterator[Row | None]:
    layers = row.shape.task.profile.num_layers
    for cuts in itertools.combinations(range(1, layers), row.shape.num_stages - 1):
        yield _cut(row, list(itertools.pairwise((0, *cuts, layers))))


def _steps(row: Row) -> Iterator[Row | None]:
    for boundary in range(row.shape.num_stages - 1):
        for step in (-1, 1):
            yield _moved(row, boundary, step)


def _moved(row: Row, boundary: int, step: int) -> Row | None:
    layers = list(row.chain.layers)
    (first, end), (_, last) = layers[boundary], layers[boundary + 1]
    if not first < end + step < last:
        return None
    layers[boundary], layers[boundary + 1] = (first, end + step), (end + step, last)
    return _cut(row, layers)


def _cut(row: Row, layers: Sequence[tuple[int, int]]) -> Row | None:
    chain = row.shape.with_layers(layers, max(row.counts))
    return None if chain is None else Row(row.shape, chain, row.counts)
