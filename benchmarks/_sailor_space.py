"""The planner's own search on Sailor's numbers: `SailorSpace` gives it stages, pipelines and rings at its costs.

What Sailor's simulator charges for an iteration of `M` micro-batches is
(M - 1) x slowest stage + sum of stages + slowest update + slowest ring, a stage's seconds being those of its
layers and of what it sends. That is the closed form `first + (M - 1) x pace` of the search, so that the tree,
its bounds and the exact split of layers serve as they are. A place (a chip in a zone) is a node group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from benchmarks._models import gpt
from benchmarks._sailor import FLOAT_BYTES, Case, LayerTable, Place, SailorPlan, StageUse, Tables
from isthmus.core.chip import Chip, InNodeLink
from isthmus.core.pool import NodeGroup
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.search.compose.best_layouts import BestLayouts
from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.costs.routes import Route, Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import ChipSlot, flatten_pools
from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound
from isthmus.plan.search.pipelines.enumerate_pipelines import PipelineConfig, PipelineEnumerator
from isthmus.plan.search.pipelines.pipeline_ranking import BoundedPipeline, PipelineGroup
from isthmus.plan.search.pipelines.pipeline_shape import PipelineCost, PipelineShape, PipelineSplit
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.pipelines.stage_counts import StageCountGroup
from isthmus.plan.search.pipelines.stage_layout import PipelineSegment
from isthmus.plan.search.splits.split_equal_layers import LayerTimes, split_equal_layers
from isthmus.plan.time.calibration import DATA_SHEET

NEVER_S = 1e9
"""Seconds of a layer that was never measured."""

MANY = 1 << 16
"""Replicas have connections of their own: what crosses between two places at once has no common limit."""


def spots_of_case(case: Case, tables: Tables) -> list[ChipSlot]:
    """Return the places of a case as the planner's spots, fastest chips first."""
    found = []
    for (kind, zone), count in case.chips.items():
        rows = [tables.times_of(kind, 1, tp) for tp in (1, 2, 4)]
        speed = max((1 / (tp * sum(row.layer_s)) for tp, row in zip((1, 2, 4), rows, strict=True) if row),
                    default=1.0)  # fmt: skip
        chip = Chip(
            name=kind,
            peak_flop_per_s={"fp32": speed * 1e12},
            memory_bytes=round(tables.memory_gb[kind] * 2**30),
            memory_bandwidth_bytes_per_s=1e12,
            in_node_link=InNodeLink(name="link", bandwidth_bytes_per_s=1e11),
        )
        group = NodeGroup(
            name=kind,
            chip=kind,
            nodes=max(1, count // case.chips_per_node),
            chips_per_node=case.chips_per_node,
            network_gbps=10.0,  # what is sent has its measured seconds
        )
        if count:
            found.append(ChipSlot(cluster=zone, owner=zone, group=group, chip=chip, chips=min(count, group.num_chips)))
    return sorted(found, key=lambda spot: -spot.chip.flop_per_s("fp32"))


def place_of(spot: ChipSlot) -> Place:
    """Return the place that a spot stands for."""
    return spot.chip.name, spot.cluster


class SailorWays(Routes):
    """What was measured between zones; every replica has a way of its own."""

    def __init__(self, tables: Tables, spots: Sequence[ChipSlot]) -> None:
        places = [place_of(spot) for spot in spots]
        rates = {
            (a[1], b[1]): max(tables.bytes_per_s(x, y) for x in places for y in places
                              if x[1] == a[1] and y[1] == b[1])
            for a in places for b in places
        }  # fmt: skip
        self._routes = {ends: Route(0.0, MANY * rate) for ends, rate in rates.items() if rate}
        self._index()


@dataclass(frozen=True)
class SailorTask(TrainingWorkload):
    """What is trained, by Sailor's measurements."""

    tables: Tables


class SailorSeat(StageCostTable):
    """A stage's seconds and bytes by its layers, as Sailor measured them."""

    workload: SailorTask

    @cached_property
    def measured(self) -> LayerTable | None:
        """What was measured of this chip, cut and micro-batch size."""
        return self.workload.tables.times_of(self.chip.name, self.batch.micro_batch_size, self.degrees.tp)

    @cached_property
    def mean_layer_s(self) -> float:
        """Seconds of a decoder layer, both ways."""
        if self.measured is None:
            return NEVER_S
        inner = self.measured.layer_s[2:-1]
        return sum(inner) / len(inner)

    @cached_property
    def ends_s(self) -> tuple[float, float]:
        """Seconds of the embedding (and what the first layer takes beyond others), and of the head."""
        if self.measured is None:
            return NEVER_S, NEVER_S
        each = self.measured.layer_s
        return each[0] + each[1] - self.mean_layer_s, each[-1]

    def max_layers(self, is_first: bool, is_last: bool, in_flight: int, *_: int) -> int:
        """Return how many decoder layers fit: nothing is recomputed, nothing dealt out over replicas."""
        tables, tp, size = self.workload.tables, self.degrees.tp, self.batch.micro_batch_size
        count = tables.num_layers - 2

        def needs(layer: int) -> float:
            return tables.state_bytes(layer, tp) + in_flight * tables.held_bytes(layer, tp, size)

        left = tables.room_bytes(self.chip.name, tp) - is_first * needs(0) - is_last * needs(count + 1)
        return min(count, math.floor(left / needs(1))) if left > 0 and self.measured else 0

    def stage_times(self, is_first: bool, is_last: bool, in_flight: int, sending_s: float) -> LayerTimes:
        """Return the seconds of 1, 2, ... decoder layers in a place, as many as fit, and of what it sends."""
        key = (is_first, is_last, in_flight, sending_s)
        if key not in self._known:
            start = sending_s + is_first * self.ends_s[0] + is_last * self.ends_s[1]
            most = self.max_layers(is_first, is_last, in_flight)
            seconds = (start + n * self.mean_layer_s for n in range(1, most + 1))
            self._known[key] = LayerTimes(tuple(seconds))
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[bool, bool, int, float], LayerTimes]:
        return {}


class SailorShape(PipelineShape):
    """A pipeline at the costs that Sailor's simulator charges."""

    workload: SailorTask
    segments: tuple[PipelineSegment, ...]

    @cached_property
    def places(self) -> list[tuple[StageCostTable, float, int]]:
        """Seat, seconds of what it sends for a micro-batch both ways, and how many stages in a row are so."""
        message = self.workload.tables.message_bytes(1, self.segments[0].cost_table.batch.micro_batch_size)
        if self.pooled:
            rows = [list(zip(map(place_of, one.slots), self.tps, strict=True)) for one in self.uniform_shapes]
            return [
                (seat, max(self._sending_s(ends, index, message) for ends in rows), 1)
                for index, seat in enumerate(self.cost_tables)
            ]
        few = [(one, min(one.num_stages, 3)) for one in self.segments]  # first, inner and last of a segment
        ends = [(place_of(one.slot), one.cost_table.degrees.tp) for one, count in few for _ in range(count)]
        copies = [max(1, one.num_stages - 2 if i == 1 else 1) for one, count in few for i in range(count)]
        seats = [one.cost_table for one, count in few for _ in range(count)]
        return [
            (seat, self._sending_s(ends, index, message), count)
            for index, (seat, count) in enumerate(zip(seats, copies, strict=True))
        ]

    @property
    def tps(self) -> list[int]:
        """Tensor parallelism of every stage."""
        return [seat.degrees.tp for seat in self.cost_tables]

    def _sending_s(self, ends: Sequence[tuple[Place, int]], index: int, message: float) -> float:
        send_s, here, last = self.workload.tables.send_s, ends[index], len(ends) - 1
        on = send_s(*here, *ends[index + 1], message) if index < last else 0.0
        back = send_s(*here, *ends[index - 1], message) if index else 0.0
        if 0 < index < last:
            return on + back
        if index:
            return 2 * back
        return on if self.num_stages <= 3 else 2 * on

    @cached_property
    def bound(self) -> PipelineCost:
        """What no split can beat: layers in parts, memory ignored."""
        layers, last = self.workload.profile.num_layers, len(self.places) - 1
        offered, speed, sum_s, longest_s, least_s = 0.0, 0.0, 0.0, 0.0, math.inf
        for index, (seat, sending_s, count) in enumerate(self.places):
            layer_s = seat.mean_layer_s
            start_s = sending_s + (index == 0) * seat.ends_s[0] + (index == last) * seat.ends_s[1]
            offered += count * start_s / layer_s
            speed += count / layer_s
            sum_s += count * start_s
            longest_s, least_s = max(longest_s, start_s + layer_s), min(least_s, layer_s)
        pace_s = max((layers + offered) / speed, longest_s)
        return PipelineCost(sum_s + layers * least_s + self._update_s, pace_s)

    def best_split(self, micro_batches: int) -> PipelineSplit | None:
        """Return the best split for replicas of `micro_batches` each, or None where memory admits none."""
        last = self.num_stages - 1
        stages = ((seat, sending_s) for seat, sending_s, count in self.places for _ in range(count))
        tables = [
            seat.stage_times(stage == 0, stage == last, last - stage + 1, sending_s)
            for stage, (seat, sending_s) in enumerate(stages)
        ]
        if not all(table.seconds and table.seconds[0] < math.inf for table in tables):
            return None
        found = split_equal_layers(tables, self.workload.profile.num_layers, micro_batches)
        if found is None:
            return None
        ends = [0, *itertools.accumulate(found.counts)]
        layers = tuple(itertools.pairwise(ends))
        first_s = found.sum_s + self._update_s + self._ring_s(layers)
        if first_s == math.inf:
            return None  # a ring over a link that was never measured
        chain = PipelineSplit(layers, PipelineCost(first_s, found.slowest_s), link_bound=False)
        return replace(chain, members=tuple((one, chain) for one in self.uniform_shapes)) if self.pooled else chain

    @cached_property
    def _update_s(self) -> float:
        return max(one.cost_table.measured.update_s if one.cost_table.measured else NEVER_S for one in self.segments)

    def _ring_s(self, layers: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of the slowest stage's all-reduce."""
        tables, slowest_s = self.workload.tables, 0.0
        for stage, (tp, cut) in enumerate(zip(self.tps, layers, strict=True)):
            floats = sum(tables.parameters(layer, 1) for layer in sailor_layers(cut, tables))
            ring = [place_of(one.slots[stage]) for one in self.uniform_shapes for _ in range(min(one.dp, 2))]
            for a, b in set(itertools.pairwise(ring)):
                slowest_s = max(slowest_s, tables.ring_s(a, b, floats * FLOAT_BYTES / tp, self.dp))
        return slowest_s


@dataclass
class SailorChains(PipelineEnumerator):
    """The planner's pipelines, those that return each by itself: what it sends has its own price."""

    def by_stage_counts(
        self,
        cost_tables: tuple[StageCostTable, ...],
        layer_s: tuple[float, ...],
        count_group: StageCountGroup,
    ) -> list[PipelineGroup]:
        """Return the pipelines of each of these numbers of stages whose links are all measured."""
        layers, found = cost_tables[0].workload.profile.num_layers, []
        for stages in count_group.stage_counts:
            pace_s = layers / sum(n / each_s for n, each_s in zip(stages, layer_s, strict=True))
            parts = partial(self._measured, PipelineConfig(cost_tables, count_group.dp, stages))
            found.append(PipelineGroup(count_group.dp, layers * min(layer_s), pace_s, parts))
        return found

    def _measured(self, one: PipelineConfig) -> list[BoundedPipeline]:
        found = []
        for order in self.orders:
            for shape in list(self.make_pipeline(one, order, "1f1b").variants):
                shape.return_counts = ()
                if isinstance(shape, SailorShape) and all(each_s < math.inf for _, each_s, _ in shape.places):
                    cost = shape.bound
                    found.append(BoundedPipeline(one.dp, cost.first_s, cost.interval_s, lambda _, made=shape: made))
        return found


@dataclass
class SailorSpace(SearchSpace):
    """The planner's space with stages, pipelines and rings at Sailor's costs."""

    workload: SailorTask

    def enumerate_pipelines(
        self,
        replica_group: Sequence[ChipSlot],
        micro_batch_size: int,
        micro_batches: int,
        coarse: bool = False,
    ) -> SailorChains:
        """Return the planner's pipelines over measured links."""
        made = super().enumerate_pipelines(replica_group, micro_batch_size, micro_batches, coarse)
        return SailorChains(**{one.name: getattr(made, one.name) for one in fields(made)})

    def _slot_orders(
        self, replica_group: Sequence[ChipSlot], coarse: bool
    ) -> list[tuple[tuple[ChipSlot, ...], bool, bool]]:
        """Return the planner's orders, those left out in which neighbours have no measured link."""
        linked = self.workload.tables.linked
        return [
            (order, once, back)
            for order, once, back in super()._slot_orders(replica_group, coarse)
            if all(linked(place_of(a), place_of(b)) for a, b in itertools.pairwise(flatten_pools(order)))
        ]

    def degree_choices(self, slot: ChipSlot) -> tuple[StageDegrees, ...]:
        """Return the tensor parallelism that was measured."""
        kind, tables = slot.chip.name, self.workload.tables
        sizes = tables.micro_batch_sizes([kind])
        return tuple(
            StageDegrees(tp=tp)
            for tp in (1, 2, 4)
            if tp <= slot.group.chips_per_node and any(tables.times_of(kind, size, tp) for size in sizes)
        )

    def cost_table(self, slot: ChipSlot, degrees: StageDegrees, micro_batch_size: int) -> StageCostTable:
        """Return the seat of a cut at a spot; spots of one kind share it."""
        key = (*slot.kind, degrees, micro_batch_size)
        if key not in self._cost_tables:
            self._cost_tables[key] = SailorSeat(self.workload, slot, degrees, micro_batch_size)
        return self._cost_tables[key]

    def group_key(self, replica_group: Sequence[ChipSlot]) -> tuple[object, ...]:
        """Return the key of a replica group's pipelines: links inside a zone differ by zone."""
        return *super().group_key(replica_group), *(spot.cluster for spot in replica_group)

    def make_shape(self, segments: Sequence[PipelineSegment], dp: int, schedule: str) -> SailorShape:
        """Return a pipeline at Sailor's costs."""
        return SailorShape(self.workload, segments, dp, schedule, 0, self.routes)

    def ring_s(self, replica_groups: Sequence[Sequence[ChipSlot]]) -> float:  # noqa: ARG002
        """Return what a ring over replica groups takes beyond their own: next to nothing by Sailor's simulator."""
        return 0.0


def sailor_layers(cut: tuple[int, int], tables: Tables) -> tuple[int, ...]:
    """Return Sailor's numbers of the layers `[first, last)` of the decoder, embedding and head with them."""
    count = tables.num_layers - 2
    first, last = cut
    return tuple(range(0 if first == 0 else first + 1, count + 2 if last == count else last + 1))


def sailor_plans(layout: PlanLayout, tables: Tables) -> list[SailorPlan]:
    """Return a layout in Sailor's form: in both, where it has two.

    Rows with the same layers become replicas of one pipeline. Unlike ones are pipelines of their own, which
    all have as many replicas: one, as Sailor writes what FlashFlex plans, or as many as go into all rows. Its
    simulator reduces gradients inside and between pipelines one after the other, and charges the two apart.
    """
    rows = []
    for row in layout.pipelines:
        places = map(place_of, row.shape.slots)
        ends = tuple((place, seat.degrees.tp) for place, seat in zip(places, row.shape.cost_tables, strict=True))
        rows.append((row.split.layers, ends, row.shape.dp))
    if len({layers for layers, _, _ in rows}) == 1:
        stages = tuple(
            StageUse(sailor_layers(cut, tables), tuple(ends[i] for _, ends, dp in rows for _ in range(dp)))
            for i, cut in enumerate(rows[0][0])
        )
        return [SailorPlan(layout.micro_batch_size, (stages,))]
    found = []
    for each in sorted({1, math.gcd(*(dp for _, _, dp in rows))}):
        pipelines: list[tuple[StageUse, ...]] = []
        for layers, ends, dp in rows:
            cuts = zip(layers, ends, strict=True)
            stages = tuple(StageUse(sailor_layers(cut, tables), (end,) * each) for cut, end in cuts)
            pipelines += [stages] * (dp // each)
        found.append(SailorPlan(layout.micro_batch_size, tuple(pipelines)))
    return found


def search(case: Case, tables: Tables, training: Mapping[str, Any], width: int = 32) -> list[SailorPlan]:
    """Return the plans that our search finds for a case at Sailor's costs, best first."""
    profile = gpt(training["hidden_size"], training["heads"], training["num_layers"])
    task = SailorTask(profile, training["sequence_length"], "fp32", DATA_SHEET, tables)
    spots = spots_of_case(case, tables)
    limits = SearchLimits(
        schedule="1f1b",
        zero=0,
        equal_micro_batches=True,
        max_micro_batch_size=max(tables.micro_batch_sizes(case.kinds)),
    )
    space = SailorSpace(task, SailorWays(tables, spots), limits)
    explorer = BranchAndBound(space, case.samples, requested_size=1, best_layouts=BestLayouts(width))
    return [plan for layout in explorer.run(spots) for plan in sailor_plans(layout, tables)]
