"""`PipelineEnumerator`: every pipeline over a replica group, in the order of lower bounds, generated on demand.

The bounds need no split: a pipeline's interval is at least what all its chips together need for the model,
and what its messages occupy a link; its first micro-batch takes at least what its fastest chips would. A heap
holds whole groups of pipelines: first those of one choice of degrees and number of replicas, then those of
each number of stages, then each order of slots. Bounds of groups prune most pipelines before they are
generated, and what order and schedule do not change is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import mul
from typing import NamedTuple

from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from isthmus.plan.search.pipelines.equal_layer_bounds import least_end_s, least_interval_s
from isthmus.plan.search.pipelines.pipeline_ranking import (
    BoundedPipeline,
    PipelineGroup,
    PipelineRanking,
    RankKey,
)
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape
from isthmus.plan.search.pipelines.stage_counts import StageCountGroup, StageCounts
from isthmus.plan.search.pipelines.stage_layout import PipelineSegment


class PipelineConfig(NamedTuple):
    """A pipeline apart from order and schedule."""

    # Cost table of each slot of the replica group.
    cost_tables: tuple[StageCostTable, ...]
    dp: int
    # Number of stages at each slot.
    stage_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """An order of a replica group's slots, and the cost of messages along it."""

    slots: tuple[ChipSlot, ...]
    # Index of each slot in the replica group.
    slot_indices: tuple[int, ...]
    # Whether a pipeline may visit each slot once.
    visits_once: bool
    # Whether a pipeline may end at the first slot again.
    can_return: bool
    # Delay of all hops; `message_s` and `wire_s` (slowest link) are one replica's message time.
    delay_s: float
    message_s: float
    wire_s: float

    def overhead_s(self, cost_tables: Sequence[StageCostTable], dp: int) -> float:
        """Return the seconds of a micro-batch beside its layers: embedding, head and hops of all replicas."""
        first, last = cost_tables[self.slot_indices[0]], cost_tables[self.slot_indices[-1]]
        end_s = last.head_s
        if self.can_return:
            end_s = min(end_s, first.head_s) if self.visits_once else first.head_s
        return 2 * (self.delay_s + dp * self.message_s) + first.embedding_s + end_s


@dataclass
class PipelineEnumerator:
    """The pipelines over all slots of a replica group."""

    replica_group: tuple[ChipSlot, ...]
    orders: Sequence[SlotOrder]
    # Combinations of degrees: a cost table for each slot.
    cost_tables: Sequence[tuple[StageCostTable, ...]]
    # Micro-batches of all replicas.
    micro_batches: int
    stage_counts: StageCounts
    # Whether numbers of replicas and stages are thinned further.
    coarse: bool
    make_shape: Callable[[Sequence[PipelineSegment], int, str], PipelineShape]

    def ranked_by_end(self, limit_s: float = math.inf) -> PipelineRanking:
        """Return the pipelines by a lower bound on the batch's end alone; may omit those above `limit_s`."""
        total = self.micro_batches

        def end_s(dp: int, first_s: float, interval_s: float) -> float:
            return first_s + (-(-total // dp) - 1) * interval_s

        choices = [one for one in self._choices if one.least_s < limit_s]
        if not choices or total * min(one.wire_s for one in self.orders) >= limit_s:
            choices = []
        groups = [one.group for one in choices]
        return PipelineRanking(groups, end_s, lambda: sum(one.count for one in choices), limit_s, by_end=True)

    def ranked_by(self, rank_key: RankKey) -> PipelineRanking:
        """Return the pipelines by ascending rank."""
        groups = [one for choice in self._choices for one in choice.groups]
        return PipelineRanking(groups, rank_key, lambda: sum(one.count for one in self._choices))

    @property
    def degree_groups(self) -> list[PipelineGroup]:
        """All pipelines as groups, one for each choice of degrees."""
        return [one.group for one in self._choices]

    def all_pipelines(self) -> Iterator[BoundedPipeline]:
        """Yield all pipelines, order by order."""
        for order in self.orders:
            along = replace(self, orders=[order])
            try:
                for choice in along._choices:
                    yield from choice.group.pipelines
            finally:
                along.clear_cache()

    def clear_cache(self) -> None:
        """Forget the pipelines, which refer to this object: a cycle that only the collector would free."""
        self.__dict__.pop("_choices", None)

    @cached_property
    def _choices(self) -> list[_DegreeChoice]:
        """The pipelines by degrees; what a slot does with a cost table is computed once for all of them."""
        known: dict[tuple[int, int, int], _SlotRate] = {}
        found = []
        for cost_tables in self.cost_tables if self.orders else ():
            reference, rates = cost_tables[0], []
            same = 0 if reference.workload.equal_layers else id(reference)
            for place, table in enumerate(cost_tables):
                key = place, id(table), same
                if key not in known:
                    known[key] = _SlotRate.of(self.replica_group[place], table, reference)
                rates.append(known[key])
            found.append(_DegreeChoice(self, cost_tables, rates))
        return found

    def by_stage_counts(
        self,
        cost_tables: tuple[StageCostTable, ...],
        layer_s: tuple[float, ...],
        count_group: StageCountGroup,
    ) -> list[PipelineGroup]:
        """Return one group per number of stages for one choice of degrees and number of replicas.

        Skips those with more chips than allowed. The bounds count chips and messages.
        """
        most, dp = self.stage_counts.limits.max_chips, count_group.dp
        task, least_s, found = cost_tables[0].workload, min(layer_s), []
        layers = task.profile.num_layers
        rates, chips = (
            [1 / (layers * each_s) for each_s in layer_s],
            [dp * cost_table.num_chips for cost_table in cost_tables],
        )
        overhead_s = min(order.overhead_s(cost_tables, dp) for order in self.orders)
        wire_s = dp * min(order.wire_s for order in self.orders)
        for stages in count_group.stage_counts:
            if most and sum(map(mul, stages, chips)) > most:
                continue
            first_s = layers * least_s + overhead_s
            if task.equal_layers:  # one layer per stage, the others on the fastest chips
                first_s += sum(map(mul, stages, layer_s)) - sum(stages) * least_s
            interval_s = max(1 / sum(map(mul, stages, rates)), wire_s)
            parts = partial(self._tighter_bounds, cost_tables, layer_s, dp, stages, first_s, overhead_s, wire_s)
            found.append(PipelineGroup(dp, first_s, interval_s, parts, cost_tables=cost_tables, stage_counts=stages))
        return found

    def _tighter_bounds(
        self,
        cost_tables: tuple[StageCostTable, ...],
        layer_s: tuple[float, ...],
        dp: int,
        stage_counts: tuple[int, ...],
        first_s: float,
        overhead_s: float,
        wire_s: float,
    ) -> list[PipelineGroup]:
        """Return the group with these numbers of stages under tighter bounds: stages hold whole layers."""
        one = PipelineConfig(cost_tables, dp, stage_counts)
        task, layers = cost_tables[0].workload, cost_tables[0].workload.profile.num_layers
        kinds, last_s = list(zip(stage_counts, layer_s, strict=True)), 0.0
        if not any(slot.members for slot in self.replica_group):
            largest, zero = -(-layers // sum(stage_counts)), self.stage_counts.limits.zero
            last_s = min(cost_table.least_reduce_and_update_s(largest, dp, zero) for cost_table in cost_tables)
        if task.equal_layers:
            interval_s = least_interval_s(layers, kinds)
        else:
            interval_s = layers / sum(count / each_s for count, each_s in kinds)
        wire_interval_s = max(interval_s, wire_s)

        def alone() -> float:
            repeats = -(-self.micro_batches // dp) - 1
            return least_end_s(layers, kinds, repeats, wire_interval_s) + last_s + overhead_s

        parts = partial(self._by_order, one, first_s - overhead_s + last_s, interval_s)
        weighed = alone if task.equal_layers else None
        return [
            PipelineGroup(
                dp, first_s + last_s, wire_interval_s, parts, weighed, weighed is not None, cost_tables, stage_counts
            )
        ]

    def least_end_s(
        self, cost_tables: tuple[StageCostTable, ...], layer_s: tuple[float, ...], count_group: StageCountGroup
    ) -> float:
        """Return a lower bound on the batch's end with any number of stages of a group, for equal layers."""
        layers, dp = cost_tables[0].workload.profile.num_layers, count_group.dp
        kinds = list(zip(count_group.max_stages, layer_s, strict=True))
        delay_s, message_s, wire_s = self._least_hops_s
        interval_s = max(least_interval_s(layers, kinds), dp * wire_s)
        end_s = least_end_s(layers, kinds, -(-self.micro_batches // dp) - 1, interval_s, may_be_empty=True)
        ends_s = min(one.embedding_s for one in cost_tables) + min(one.head_s for one in cost_tables)
        return (end_s + 2 * (delay_s + dp * message_s) + ends_s) * (1 - 1e-9)

    @cached_property
    def _least_hops_s(self) -> tuple[float, float, float]:
        """Least delay, message time and wire time of any order."""
        rows = ((one.delay_s, one.message_s, one.wire_s) for one in self.orders)
        delay_s, message_s, wire_s = map(min, zip(*rows, strict=True))
        return delay_s, message_s, wire_s

    def _by_order(self, config: PipelineConfig, first_s: float, interval_s: float) -> list[BoundedPipeline]:
        found = []
        for order in self.orders:
            if order.visits_once or config.stage_counts[order.slot_indices[0]] > 1:
                wire_interval_s = max(interval_s, config.dp * order.wire_s)
                made = partial(self.make_pipeline, config, order)
                found.append(
                    BoundedPipeline(
                        config.dp,
                        first_s + order.overhead_s(config.cost_tables, config.dp),
                        wire_interval_s,
                        made,
                        config.cost_tables,
                        config.stage_counts,
                    )
                )
        return found

    def make_pipeline(self, config: PipelineConfig, order: SlotOrder, schedule: str) -> PipelineShape:
        """Return the pipeline for a schedule."""
        segments = [
            PipelineSegment(slot, config.cost_tables[i], config.stage_counts[i])
            for slot, i in zip(order.slots, order.slot_indices, strict=True)
        ]
        shape = self.make_shape(segments, config.dp, schedule)
        if order.can_return:
            shape.return_counts, shape.visits_once = (
                self.stage_counts.return_counts(segments[0].num_stages),
                order.visits_once,
            )
        return shape


class _SlotRate(NamedTuple):
    """What a slot's chips do with one cost table."""

    # Seconds of a layer.
    layer_s: float
    # Stages that fit.
    capacity: int
    # Layers per second of all of them.
    layers_per_s: float

    @classmethod
    def of(cls, slot: ChipSlot, cost_table: StageCostTable, reference: StageCostTable) -> _SlotRate:
        layer_s, capacity = cost_table.layer_s(reference), slot.stage_capacity(cost_table.num_chips)
        return cls(layer_s, capacity, capacity / layer_s)


class _DegreeChoice:
    """The pipelines of one choice of degrees; `least_s` is what all chips need for all micro-batches."""

    def __init__(
        self, pipelines: PipelineEnumerator, cost_tables: tuple[StageCostTable, ...], rates: Sequence[_SlotRate]
    ) -> None:
        self._pipelines, self._cost_tables, self._rates = pipelines, cost_tables, rates
        self._num_layers = cost_tables[0].workload.profile.num_layers
        rate = sum([one.layers_per_s for one in rates]) / self._num_layers
        self.least_s = pipelines.micro_batches / rate if rate else math.inf

    @cached_property
    def _layer_s(self) -> tuple[float, ...]:
        return tuple(one.layer_s for one in self._rates)

    @property
    def group(self) -> PipelineGroup:
        """All its pipelines, which `least_s` bounds."""
        return PipelineGroup(
            1, 0.0, 0.0, lambda: self.groups, lambda: self.least_s * (1 - 1e-9), cost_tables=self._cost_tables
        )

    @property
    def count(self) -> int:
        """Upper bound on its pipelines."""
        return sum(len(one.stage_counts) for one in self._count_groups()) * len(self._pipelines.orders)

    def _count_groups(self) -> tuple[StageCountGroup, ...]:
        chains = self._pipelines
        capacities = [one.capacity for one in self._rates]
        return chains.stage_counts.groups_for(capacities, chains.micro_batches, chains.coarse)

    def _micro_batches_per_s(self, stage_counts: Sequence[int]) -> float:
        each = (count / layer_s for count, layer_s in zip(stage_counts, self._layer_s, strict=True))
        return sum(each) / self._num_layers

    @cached_property
    def groups(self) -> list[PipelineGroup]:
        """The pipelines by number of replicas."""
        chains, found = self._pipelines, list[PipelineGroup]()
        rules, degrees = chains.stage_counts.limits.framework, self._cost_tables[0].degrees
        for count_group in self._count_groups():
            if rules is not None:
                kept = tuple(
                    stages
                    for stages in count_group.stage_counts
                    if rules.admits_replicas(count_group.dp, sum(stages), chains.micro_batches, degrees)
                )
                if not kept:
                    continue
                count_group = StageCountGroup(count_group.dp, tuple(map(max, zip(*kept, strict=True))), kept)
            first_s, interval_s = (
                self._num_layers * min(self._layer_s),
                1 / self._micro_batches_per_s(count_group.max_stages),
            )
            ends = self._cost_tables, self._layer_s, count_group
            closer = partial(chains.least_end_s, *ends) if self._cost_tables[0].workload.equal_layers else None
            parts = partial(chains.by_stage_counts, *ends)
            found.append(
                PipelineGroup(count_group.dp, first_s, interval_s, parts, closer, cost_tables=self._cost_tables)
            )
        return found
