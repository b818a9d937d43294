"""`rank_by_value`: the pipelines of a replica group by a lower bound on their value, groups opened on demand.

The value of a plan is per_s x time + per_cost x price of its chips x time + per_j x energy. Lower bounds on the time
are those of `PipelineEnumerator`. A group of pipelines has at least one stage at each slot; the price and the idle
power of these chips, and the passes of all layers on the chips that do them for least, bound cost and energy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from isthmus.plan.search.costs.plan_value import ChipDraw, PlanValue
from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from isthmus.plan.search.pipelines.enumerate_pipelines import PipelineEnumerator
from isthmus.plan.search.pipelines.pipeline_ranking import BoundedPipeline, PipelineGroup

_BELOW = 1 - 1e-9
"""Factor on bounds, for rounding."""


@dataclass(frozen=True)
class ValueBound:
    """Lower bounds on the chips of a pipeline or of a group of them, and on the passes of one micro-batch."""

    # Price of its chips for a second, and their idle power.
    price_per_s: float
    waiting_w: float
    # Least price, and least energy above idle power, of the passes of all layers over one micro-batch.
    pass_cost: float
    pass_j: float

    def value(self, value: PlanValue, time_s: float, micro_batches: int) -> float:
        """Return a lower bound on the value of `micro_batches` in a step of at least `time_s`."""
        cost = max(self.price_per_s * time_s, self.pass_cost * micro_batches)
        return value.of(time_s, cost, self.waiting_w * time_s + self.pass_j * micro_batches)


def bound_of(
    draws: Sequence[ChipDraw], cost_tables: Sequence[StageCostTable], stage_counts: Sequence[int], dp: int
) -> ValueBound:
    """Return the bound for pipelines with at least these stages at each slot, one each if none are given."""
    layers = cost_tables[0].workload.profile.num_layers
    price_per_s = waiting_w = 0.0
    pass_cost, pass_j = [], []
    for draw, table, stages in zip(draws, cost_tables, stage_counts or itertools.repeat(1), strict=False):
        chips = dp * stages * table.num_chips
        price_per_s += chips * draw.price_per_s
        waiting_w += chips * draw.waiting_w
        chip_s = layers * table.layer_s(cost_tables[0]) * table.num_chips * _BELOW
        pass_cost.append(chip_s * draw.price_per_s)
        pass_j.append(chip_s * draw.more_w)
    return ValueBound(price_per_s, waiting_w, min(pass_cost), min(pass_j))


def rank_by_value(
    pipelines: PipelineEnumerator, draws: Sequence[ChipDraw], value: PlanValue, micro_batches: int, extra_s: float = 0.0
) -> Iterator[tuple[float, ValueBound, BoundedPipeline]]:
    """Yield (lower bound, its parts, pipeline), the least bound first; every pipeline trains all `micro_batches` alone.

    `draws` are those of the slots of the replica group, `extra_s` seconds that every step takes longer.
    """
    number = itertools.count()
    heap: list[tuple[float, int, ValueBound, PipelineGroup | BoundedPipeline]] = []

    def push(one: PipelineGroup | BoundedPipeline, least: float) -> None:
        bound = bound_of(draws, one.cost_tables, one.stage_counts, one.dp)
        end_s = one.first_s + (-(-micro_batches // one.dp) - 1) * one.interval_s
        if isinstance(one, PipelineGroup):
            end_s = max(end_s, one.end_s)
        found = bound.value(value, end_s * _BELOW + extra_s, micro_batches)
        heappush(heap, (max(least, found), next(number), bound, one))

    for group in pipelines.degree_groups:
        push(group, 0.0)
    while heap:
        least, _, bound, one = heappop(heap)
        if isinstance(one, BoundedPipeline):
            yield least, bound, one
            continue
        for part in one.members:
            push(part, least)
