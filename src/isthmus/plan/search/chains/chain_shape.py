"""`Shape`: a pipeline replicated `dp` times, with its best split of layers and what that costs.

`enumerate_chains.py` has the lower bounds that hold for any split.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.plan.search.chains.stage_layout import Line
from isthmus.plan.search.costs.layer_ranges import RangeTimes
from isthmus.plan.search.costs.slots import flat
from isthmus.plan.search.costs.stage_costs import StageCut, few
from isthmus.plan.search.splits.split_equal_layers import LayerTimes, least_share, share_layers
from isthmus.plan.search.splits.split_layers import split_layers


@dataclass(frozen=True, slots=True)
class Cost:
    """Closed-form time of a pipeline: first_s + (micro-batches - 1) x pace_s."""

    # Seconds of the first micro-batch, gradient reduction and update included.
    first_s: float
    # Seconds of each further micro-batch.
    pace_s: float


@dataclass(frozen=True)
class Chain:
    """A split of the layers over a pipeline's stages."""

    # Layers `[first, last)` of each stage.
    layers: tuple[tuple[int, int], ...]
    cost: Cost
    # Whether a link, not a stage, sets the pace.
    link_bound: bool
    # With pooled slots: the shapes of replicas with equal stage locations, each with its split.
    parts: tuple[tuple[Shape, Chain], ...] = ()


class Shape(Line):
    """A pipeline whose best split is computed on demand."""

    @cached_property
    def _least_last_s(self) -> float:
        """Least seconds of all-reduce and update of the stage with most layers."""
        if self.pooled:
            return 0.0
        largest = -(-self.task.profile.num_layers // self.num_stages)
        return min(one.seat.least_last_s(largest, self.dp, self.zero) for one in self.segments)

    def cut(self, micro_batches: int) -> Chain | None:
        """Return the best split for `micro_batches` per replica, or None if no split fits in memory."""
        if not self.task.equal_layers:
            split = self._split(micro_batches)
            return None if split is None else self.with_layers(split, micro_batches)
        if not self._may_fit(micro_batches):
            return None
        tables = self._tables(micro_batches)
        found = share_layers(tables, self.task.profile.num_layers, micro_batches)
        if found is None:
            return None
        ends = [0, *itertools.accumulate(found.counts)]
        layers = tuple(itertools.pairwise(ends))
        if self.pooled:
            return self.with_layers(layers, micro_batches)
        times = [table.seconds[count - 1] for table, count in zip(tables, found.counts, strict=True)]
        return self._chain(layers, times)

    def with_layers(self, layers: Sequence[tuple[int, int]], micro_batches: int) -> Chain | None:
        """Return the split with these layers per stage, or None if they do not fit."""
        if self.pooled:
            return self._together(layers, micro_batches)
        cuts = self.stage_cuts(layers, micro_batches)
        return None if cuts is None else self._chain(tuple(layers), [one.total_s for one in cuts])

    def _together(self, layers: Sequence[tuple[int, int]], micro_batches: int) -> Chain | None:
        """Return the split of a pooled shape, whose replicas wait for each other and share links."""
        chains = [one.with_layers(layers, micro_batches) for one in self.parts]
        if not all(chains):
            return None
        costs = [one.cost for one in chains if one]
        clusters = [
            name for name, _ in itertools.groupby(s.cluster for s in flat(one.spot for one in self.segments))
        ]
        wire_s = self.dp * self.message_bytes * self.ways.along(tuple(clusters)).slowest_s_per_byte
        interval_s = max(wire_s, *(one.pace_s for one in costs))
        cost = Cost(max(one.first_s for one in costs) + self._shared_s(layers), interval_s)
        link_bound = wire_s >= interval_s or any(one.link_bound for one in chains if one)
        parts = [(one, Chain(tuple(layers), cost, link_bound)) for one in self.parts]
        return Chain(tuple(layers), cost, link_bound, tuple(parts))

    def _shared_s(self, layers: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of the slowest stage's gradient ring over several clusters."""
        slowest_s = 0.0
        for stage, (first, last) in enumerate(layers):
            names = list(dict.fromkeys(one.spots[stage].cluster for one in self.parts))
            cost_table = self.seats[stage]
            num_bytes = (
                4 * cost_table.parameters(first, last) * cost_table.num_chips * (0.75 if self.zero else 1.0)
            )
            slowest_s = max(slowest_s, self.ways.ring_s(names, num_bytes))
        return slowest_s

    def stage_cuts(
        self, layers: Sequence[tuple[int, int]], micro_batches: int
    ) -> tuple[StageCut, ...] | None:
        """Return every stage with these layers, recomputed as needed, or None if one does not fit."""
        cuts = []
        for stage, (first, last) in enumerate(layers):
            in_flight = min(self.in_flight(stage), micro_batches)
            one = self.seats[stage].cut(first, last, in_flight, self.dp, self.zero)
            if one is None:
                return None
            cuts.append(one)
        return tuple(cuts)

    def _may_fit(self, micro_batches: int) -> bool:
        """Return whether the stages can hold all layers if all are recomputed."""
        last, room = self.num_stages - 1, 0
        for stage, cost_table in enumerate(self.seats):
            in_flight = min(self.in_flight(stage), micro_batches)
            most = cost_table.most_layers(stage == 0, stage == last, in_flight, self.dp, self.zero)
            if most < 1:
                return False
            room += most
        return room >= self.task.profile.num_layers

    def _tables(self, micro_batches: int) -> list[LayerTimes]:
        last, found = self.num_stages - 1, []
        least = min(self.parts, key=lambda one: one.dp)  # holds the largest optimizer shard
        for stage, cost_table in enumerate(self.seats):
            in_flight = min(self.in_flight(stage), micro_batches)
            found.append(cost_table.table(stage == 0, stage == last, in_flight, least.dp, least.zero))
        return found

    def outlook(self, micro_batches: int) -> Cost | None:
        """Return a tighter bound for unequal layers, each stage taking its cheapest; None if none fit."""
        layers = self.task.profile.num_layers
        found = least_share([one.least for one in self._ranges(micro_batches, few(self.dp))], layers)
        if found is None:
            return None
        sum_s, slowest_s = found
        return Cost(sum_s + 2 * sum(self.hops_s) + self._least_last_s, max(slowest_s, self.wire_s))

    def _ranges(self, micro_batches: int, dp: int) -> list[RangeTimes]:
        last, found = self.num_stages - 1, []
        for stage, cost_table in enumerate(self.seats):
            in_flight = min(self.in_flight(stage), micro_batches)
            found.append(cost_table.ranges(stage == 0, stage == last, in_flight, dp, self.zero))
        return found

    def _split(self, micro_batches: int) -> list[tuple[int, int]] | None:
        least = min(one.dp for one in self.parts)
        lines = [one.lines for one in self._ranges(micro_batches, least)]
        found = split_layers(self.task.profile.num_layers, lines, micro_batches)
        return None if found is None else list(found.layers)

    def _chain(self, layers: tuple[tuple[int, int], ...], times: Sequence[float]) -> Chain:
        sum_s = sum(times) + 2 * sum(self.hops_s)
        wire_s, stage_s = self.wire_s, max(times)
        interval_s = max(stage_s, wire_s, self._round_trip_s(times))
        held: dict[tuple[int, int, bool], float] = {}
        for cost_table, (first, last) in zip(self.seats, layers, strict=True):
            key = (id(cost_table), last - first, first == 0)
            if key not in held or last == self.task.profile.num_layers:
                held[key] = cost_table.last_s(cost_table.parameters(first, last), self.dp, self.zero)
        return Chain(layers, Cost(sum_s + max(held.values()), interval_s), wire_s > stage_s)

    def _round_trip_s(self, times: Sequence[float]) -> float:
        """Return the interval that the micro-batches in flight allow: each stays until its backward pass."""
        later_s = interval_s = 0.0
        count = len(times)
        for stage in reversed(range(count)):
            later_s += times[stage] + (2 * self.hops_s[stage] if stage < count - 1 else 0.0)
            interval_s = max(interval_s, later_s / self.in_flight(stage))
        return interval_s
