"""`StageLayout`: the location of a pipeline's stages: segments at slots in pipeline order, replicated `dp` times."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Self

from isthmus.plan.search.costs.routes import PathCosts, Routes
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from isthmus.plan.search.costs.workload import TrainingWorkload, ZeroStage
from isthmus.plan.time.collectives import send_s


class PipelineSegment(NamedTuple):
    """Consecutive stages at one slot."""

    slot: ChipSlot
    cost_table: StageCostTable
    num_stages: int


class StageLayout:
    """Segments in pipeline order, replicated `dp` times, under a schedule.

    Also stands for its `variants`: pipelines that return to their first slot. Bounds on it hold for them.
    """

    # Candidate numbers of the first segment's stages to place at the end.
    return_counts: tuple[int, ...] = ()
    # Whether the pipeline without a return is a variant.
    visits_once: bool = True

    def __init__(
        self,
        workload: TrainingWorkload,
        segments: Sequence[PipelineSegment],
        dp: int,
        schedule: str,
        zero: ZeroStage,
        routes: Routes,
    ) -> None:
        self.workload, self.segments, self.dp = workload, tuple(segments), dp
        self.schedule, self.zero, self.routes = schedule, zero if dp > 1 else 0, routes
        self.requested_zero = zero

    @property
    def variants(self) -> Iterator[Self]:
        """The pipelines that this layout stands for."""
        if self.visits_once:
            yield self
        first, rest = self.segments[0], self.segments[1:]
        for back in self.return_counts:
            ends = first._replace(num_stages=first.num_stages - back), first._replace(num_stages=back)
            yield type(self)(
                self.workload,
                (ends[0], *rest, ends[1]),
                self.dp,
                self.schedule,
                self.requested_zero,
                self.routes,
            )

    @cached_property
    def cost_tables(self) -> tuple[StageCostTable, ...]:
        """The cost table of every stage."""
        return tuple(one.cost_table for one in self.segments for _ in range(one.num_stages))

    @cached_property
    def slots(self) -> tuple[ChipSlot, ...]:
        """The slot of every stage."""
        return tuple(one.slot for one in self.segments for _ in range(one.num_stages))

    @cached_property
    def pooled(self) -> bool:
        """Whether a slot is pooled, so that replicas differ in their stage locations."""
        return any(one.slot.members for one in self.segments)

    @property
    def uniform_shapes(self) -> tuple[Self, ...]:
        """One shape per distinct set of stage locations among the replicas."""
        return self._pooled_shapes if self.pooled else (self,)

    @cached_property
    def _pooled_shapes(self) -> tuple[Self, ...]:
        kinds = Counter(zip(*map(self._slots_by_replica, self.segments), strict=True))
        found = []
        for row, count in kinds.items():
            stages = [(slot, one.cost_table) for one, part in zip(self.segments, row, strict=True) for slot in part]
            runs = [(key, len(list(some))) for key, some in itertools.groupby(stages)]
            segments = [PipelineSegment(slot, cost_table, number) for (slot, cost_table), number in runs]
            found.append(type(self)(self.workload, segments, count, self.schedule, self.requested_zero, self.routes))
        return tuple(found)

    def _slots_by_replica(self, segment: PipelineSegment) -> list[tuple[ChipSlot, ...]]:
        """Return the slots of a segment's stages for each replica; a pool is filled stage by stage."""
        if not segment.slot.members:
            return [(segment.slot,) * segment.num_stages] * self.dp
        chips = segment.cost_table.num_chips
        places = [one for one in segment.slot.members for _ in range(one.stage_capacity(chips))]
        return [
            tuple(places[stage * self.dp + replica] for stage in range(segment.num_stages))
            for replica in range(self.dp)
        ]

    def stage_clusters(self, segment: PipelineSegment) -> list[tuple[str, ...]]:
        """Return the clusters of each of a segment's stages: a pool is filled stage by stage."""
        if not segment.slot.members:
            return [(segment.slot.cluster,)] * segment.num_stages
        members, known = segment.slot.members, dict[tuple[int, int], tuple[str, ...]]()
        ends = [*itertools.accumulate(one.stage_capacity(segment.cost_table.num_chips) for one in members)]
        found, first, count = [], 0, len(ends)
        for stage in range(segment.num_stages):
            start = stage * self.dp
            while first < count and ends[first] <= start:
                first += 1
            last = first
            while last < count and ends[last] < start + self.dp:
                last += 1
            if (first, last) not in known:
                known[first, last] = tuple(dict.fromkeys(one.cluster for one in members[first : last + 1]))
            found.append(known[first, last])
        return found

    @cached_property
    def num_stages(self) -> int:
        """Stages of one replica."""
        return sum(one.num_stages for one in self.segments)

    @property
    def num_chips(self) -> int:
        """Chips of all replicas."""
        return self.dp * sum(one.num_stages * one.cost_table.num_chips for one in self.segments)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.segments[0].cost_table.batch.micro_batch_size

    @property
    def message_bytes(self) -> float:
        """Bytes of one micro-batch over a stage boundary."""
        return self.segments[0].cost_table.message_bytes

    @property
    def path_costs(self) -> PathCosts:
        """Message costs along its clusters."""
        return self.routes.path_costs(tuple(one.slot.cluster for one in self.segments))

    @property
    def wire_s(self) -> float:
        """Seconds for which one micro-batch of every replica occupies the slowest link."""
        return self.dp * self.message_bytes * self.path_costs.slowest_s_per_byte

    @cached_property
    def hops_s(self) -> tuple[float, ...]:
        """Seconds of an exchange at each stage boundary, shape [num_stages - 1]."""
        found: list[float] = []
        for place, one in enumerate(self.segments):
            if place:
                found.append(self._hop_s(self.segments[place - 1], one))
            if one.num_stages > 1:
                found += [self._hop_s(one, one)] * (one.num_stages - 1)
        return tuple(found)

    def _hop_s(self, before: PipelineSegment, after: PipelineSegment) -> float:
        """Return the seconds of an exchange from a stage of one segment to a stage of another one, or of the same."""
        a, b = before.slot, after.slot
        if a.cluster != b.cluster:
            return self.routes.exchange_s(a.cluster, b.cluster, self.dp * self.message_bytes)
        return 0.0 if before.cost_table.virtual else self._near_hop_s(a, b, before.cost_table, after.cost_table)

    def _near_hop_s(self, a: ChipSlot, b: ChipSlot, sender: StageCostTable, receiver: StageCostTable) -> float:
        """Return the seconds of a message inside a cluster: unlike node groups are joined by their nodes' network."""
        topology, chips = sender.chip_model.topology, sender.num_chips
        if a.group.name != b.group.name:
            num_bytes = self.message_bytes / min(chips, receiver.num_chips)
            return send_s(topology, num_bytes, same_node=False, target=receiver.chip_model.topology)
        near = 2 * chips * self.dp <= a.group.num_linked_chips
        return send_s(topology, self.message_bytes / chips, same_node=near)

    def max_in_flight(self, stage: int) -> int:
        """Return the most micro-batches that a stage holds at once."""
        after = self.num_stages - stage - 1
        return 2 * after + 1 if self.schedule == "overlapped" else after + 1
