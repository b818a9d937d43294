"""`PipelineShape`: a pipeline replicated `dp` times, with its best split of layers and what that costs.

`enumerate_pipelines.py` has the lower bounds that hold for any split.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.plan.search.costs.layer_ranges import RangeTimes
from isthmus.plan.search.costs.slots import flatten_pools
from isthmus.plan.search.costs.stage_cost_table import StageCostTable, TimedStage, round_up_replicas
from isthmus.plan.search.costs.workload import REDUCED_RATIO
from isthmus.plan.search.pipelines.stage_layout import StageLayout
from isthmus.plan.search.splits.split_equal_layers import LayerTimes, split_equal_layers, split_lower_bounds
from isthmus.plan.search.splits.split_layers import split_layers


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """Closed-form time of a pipeline: first_s + (micro-batches - 1) x pace_s."""

    # Seconds of the first micro-batch, gradient reduction and update included.
    first_s: float
    # Seconds of each further micro-batch.
    interval_s: float


@dataclass(frozen=True)
class PipelineSplit:
    """A split of the layers over a pipeline's stages."""

    # Layers `[first, last)` of each stage.
    layers: tuple[tuple[int, int], ...]
    cost: PipelineCost
    # Whether a link, not a stage, sets the pace.
    link_bound: bool
    # With pooled slots: the shapes of replicas with equal stage locations, each with its split.
    members: tuple[tuple[PipelineShape, PipelineSplit], ...] = ()


class PipelineShape(StageLayout):
    """A pipeline whose best split is computed on demand."""

    @cached_property
    def _least_update_s(self) -> float:
        """Least seconds of all-reduce and update of the stage with most layers."""
        if self.pooled:
            return 0.0
        largest = -(-self.workload.profile.num_layers // self.num_stages)
        return min(one.cost_table.least_reduce_and_update_s(largest, self.dp, self.zero) for one in self.segments)

    def gradient_bytes(self, cost_table: StageCostTable, parameters: float) -> float:
        """Return the bytes that a stage with these parameters per chip reduces."""
        return 4 * parameters * cost_table.num_chips * REDUCED_RATIO[self.zero]

    def best_split(self, micro_batches: int) -> PipelineSplit | None:
        """Return the best split for `micro_batches` per replica, or None if no split fits in memory."""
        if not self.workload.equal_layers:
            split = self._split_unequal(micro_batches)
            return None if split is None else self.with_layers(split, micro_batches)
        if not self._can_fit(micro_batches):
            return None
        tables = self._layer_times(micro_batches)
        found = split_equal_layers(tables, self.workload.profile.num_layers, micro_batches)
        if found is None:
            return None
        ends = [0, *itertools.accumulate(found.counts)]
        layers = tuple(itertools.pairwise(ends))
        if self.pooled:
            return self.with_layers(layers, micro_batches)
        times = [table.seconds[count - 1] for table, count in zip(tables, found.counts, strict=True)]
        return self._make_split(layers, times)

    def with_layers(self, layers: Sequence[tuple[int, int]], micro_batches: int) -> PipelineSplit | None:
        """Return the split with these layers per stage, or None if they do not fit."""
        if self.pooled:
            return self._pooled_split(layers, micro_batches)
        cuts = self.fit_stages(layers, micro_batches)
        return None if cuts is None else self._make_split(tuple(layers), [one.total_s for one in cuts])

    def _pooled_split(self, layers: Sequence[tuple[int, int]], micro_batches: int) -> PipelineSplit | None:
        """Return the split of a pooled shape, whose replicas wait for each other and share links."""
        chains = [one.with_layers(layers, micro_batches) for one in self.uniform_shapes]
        if not all(chains):
            return None
        costs = [one.cost for one in chains if one]
        clusters = [
            name for name, _ in itertools.groupby(s.cluster for s in flatten_pools(one.slot for one in self.segments))
        ]
        wire_s = self.dp * self.message_bytes * self.routes.path_costs(tuple(clusters)).slowest_s_per_byte
        interval_s = max(wire_s, *(one.interval_s for one in costs))
        cost = PipelineCost(max(one.first_s for one in costs) + self._cross_cluster_ring_s(layers), interval_s)
        link_bound = wire_s >= interval_s or any(one.link_bound for one in chains if one)
        parts = [(one, PipelineSplit(tuple(layers), cost, link_bound)) for one in self.uniform_shapes]
        return PipelineSplit(tuple(layers), cost, link_bound, tuple(parts))

    def _cross_cluster_ring_s(self, layers: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of the slowest stage's gradient ring over several clusters."""
        slowest_s, clusters = 0.0, [names for one in self.segments for names in self.stage_clusters(one)]
        for stage, (first, last) in enumerate(layers):
            names = clusters[stage]
            if len(names) < 2:
                continue
            cost_table = self.cost_tables[stage]
            num_bytes = self.gradient_bytes(cost_table, cost_table.parameters(first, last))
            slowest_s = max(slowest_s, self.routes.ring_s(names, num_bytes))
        return slowest_s

    def fit_stages(self, layers: Sequence[tuple[int, int]], micro_batches: int) -> tuple[TimedStage, ...] | None:
        """Return every stage with these layers, recomputed as needed, or None if one does not fit."""
        cuts = []
        for stage, (first, last) in enumerate(layers):
            in_flight = min(self.max_in_flight(stage), micro_batches)
            one = self.cost_tables[stage].fit_stage(first, last, in_flight, self.dp, self.zero)
            if one is None:
                return None
            cuts.append(one)
        return tuple(cuts)

    def _can_fit(self, micro_batches: int) -> bool:
        """Return whether the stages can hold all layers if all are recomputed."""
        last, room = self.num_stages - 1, 0
        for stage, cost_table in enumerate(self.cost_tables):
            in_flight = min(self.max_in_flight(stage), micro_batches)
            most = cost_table.max_layers(stage == 0, stage == last, in_flight, self.dp, self.zero)
            if most < 1:
                return False
            room += most
        return room >= self.workload.profile.num_layers

    def _layer_times(self, micro_batches: int) -> list[LayerTimes]:
        last, found = self.num_stages - 1, []
        least = min(self.uniform_shapes, key=lambda one: one.dp)  # holds the largest optimizer shard
        for stage, cost_table in enumerate(self.cost_tables):
            in_flight = min(self.max_in_flight(stage), micro_batches)
            found.append(cost_table.layer_times(stage == 0, stage == last, in_flight, least.dp, least.zero))
        return found

    def split_bound(self, micro_batches: int) -> PipelineCost | None:
        """Return a tighter bound for unequal layers, each stage taking its cheapest; None if none fit."""
        layers = self.workload.profile.num_layers
        found = split_lower_bounds(
            [one.least_times for one in self._range_times(micro_batches, round_up_replicas(self.dp))], layers
        )
        if found is None:
            return None
        sum_s, slowest_s = found
        return PipelineCost(sum_s + 2 * sum(self.hops_s) + self._least_update_s, max(slowest_s, self.wire_s))

    def _range_times(self, micro_batches: int, dp: int) -> list[RangeTimes]:
        last, found = self.num_stages - 1, []
        for stage, cost_table in enumerate(self.cost_tables):
            in_flight = min(self.max_in_flight(stage), micro_batches)
            found.append(cost_table.range_times(stage == 0, stage == last, in_flight, dp, self.zero))
        return found

    def _split_unequal(self, micro_batches: int) -> list[tuple[int, int]] | None:
        least = min(one.dp for one in self.uniform_shapes)
        lines = [one.by_first_layer for one in self._range_times(micro_batches, least)]
        found = split_layers(self.workload.profile.num_layers, lines, micro_batches)
        return None if found is None else list(found.layers)

    def _make_split(self, layers: tuple[tuple[int, int], ...], times: Sequence[float]) -> PipelineSplit:
        sum_s = sum(times) + 2 * sum(self.hops_s)
        wire_s, stage_s = self.wire_s, max(times)
        interval_s = max(stage_s, wire_s, self._round_trip_interval_s(times))
        held: dict[tuple[int, int, bool], float] = {}
        for cost_table, (first, last) in zip(self.cost_tables, layers, strict=True):
            key = (id(cost_table), last - first, first == 0)
            if key not in held or last == self.workload.profile.num_layers:
                held[key] = cost_table.reduce_and_update_s(cost_table.parameters(first, last), self.dp, self.zero)
        return PipelineSplit(layers, PipelineCost(sum_s + max(held.values()), interval_s), wire_s > stage_s)

    def _round_trip_interval_s(self, times: Sequence[float]) -> float:
        """Return the interval that the micro-batches in flight allow: each stays until its backward pass."""
        later_s = interval_s = 0.0
        count = len(times)
        for stage in reversed(range(count)):
            later_s += times[stage] + (2 * self.hops_s[stage] if stage < count - 1 else 0.0)
            interval_s = max(interval_s, later_s / self.max_in_flight(stage))
        return interval_s
