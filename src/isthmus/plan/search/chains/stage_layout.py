"""`Line`: the location of a pipeline's stages: segments at slots in pipeline order, replicated `dp` times."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Self

from isthmus.plan.search.costs.routes import Along, Ways
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_costs import Seat
from isthmus.plan.search.costs.task import Task, Zero
from isthmus.plan.time.collectives import send_s


class Segment(NamedTuple):
    """Consecutive stages at one slot."""

    spot: Spot
    seat: Seat
    stages: int


class Line:
    """Segments in pipeline order, replicated `dp` times, under a schedule.

    Also stands for its `variants`: pipelines that return to their first slot. Bounds on it hold for them.
    """

    # Candidate numbers of the first segment's stages to place at the end.
    back: tuple[int, ...] = ()
    # Whether the pipeline without a return is a variant.
    once: bool = True

    def __init__(
        self, task: Task, segments: Sequence[Segment], dp: int, schedule: str, zero: Zero, ways: Ways
    ) -> None:
        self.task, self.segments, self.dp = task, tuple(segments), dp
        self.schedule, self.zero, self.ways = schedule, zero if dp > 1 else 0, ways
        self.asked_zero = zero

    @property
    def variants(self) -> Iterator[Self]:
        """The pipelines that this layout stands for."""
        if self.once:
            yield self
        first, rest = self.segments[0], self.segments[1:]
        for back in self.back:
            ends = first._replace(stages=first.stages - back), first._replace(stages=back)
            yield type(self)(
                self.task, (ends[0], *rest, ends[1]), self.dp, self.schedule, self.asked_zero, self.ways
            )

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """The cost table of every stage."""
        return tuple(one.seat for one in self.segments for _ in range(one.stages))

    @cached_property
    def spots(self) -> tuple[Spot, ...]:
        """The slot of every stage."""
        return tuple(one.spot for one in self.segments for _ in range(one.stages))

    @cached_property
    def pooled(self) -> bool:
        """Whether a slot is pooled, so that replicas differ in their stage locations."""
        return any(one.spot.members for one in self.segments)

    @cached_property
    def parts(self) -> tuple[Self, ...]:
        """One shape per distinct set of stage locations among the replicas."""
        if not self.pooled:
            return (self,)
        kinds = Counter(zip(*map(self._filled, self.segments), strict=True))
        found = []
        for row, count in kinds.items():
            stages = [(slot, one.seat) for one, part in zip(self.segments, row, strict=True) for slot in part]
            runs = [(key, len(list(some))) for key, some in itertools.groupby(stages)]
            segments = [Segment(slot, cost_table, number) for (slot, cost_table), number in runs]
            found.append(type(self)(self.task, segments, count, self.schedule, self.asked_zero, self.ways))
        return tuple(found)

    def _filled(self, segment: Segment) -> list[tuple[Spot, ...]]:
        """Return the slots of a segment's stages for each replica; a pool is filled stage by stage."""
        if not segment.spot.members:
            return [(segment.spot,) * segment.stages] * self.dp
        chips = segment.seat.num_chips
        places = [one for one in segment.spot.members for _ in range(one.places(chips))]
        return [
            tuple(places[stage * self.dp + replica] for stage in range(segment.stages))
            for replica in range(self.dp)
        ]

    @cached_property
    def num_stages(self) -> int:
        """Stages of one replica."""
        return sum(one.stages for one in self.segments)

    @property
    def num_chips(self) -> int:
        """Chips of all replicas."""
        return self.dp * sum(one.stages * one.seat.num_chips for one in self.segments)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.segments[0].seat.batch.micro_batch_size

    @property
    def message_bytes(self) -> float:
        """Bytes of one micro-batch over a stage boundary."""
        return self.segments[0].seat.message_bytes

    @property
    def along(self) -> Along:
        """Message costs along its clusters."""
        return self.ways.along(tuple(one.spot.cluster for one in self.segments))

    @property
    def wire_s(self) -> float:
        """Seconds for which one micro-batch of every replica occupies the slowest link."""
        return self.dp * self.message_bytes * self.along.slowest_s_per_byte

    @cached_property
    def hops_s(self) -> tuple[float, ...]:
        """Seconds of an exchange at each stage boundary, shape [num_stages - 1]."""
        found = []
        for i in range(self.num_stages - 1):
            a, b, cost_table = self.spots[i], self.spots[i + 1], self.seats[i]
            if a.cluster != b.cluster:
                found.append(self.ways.exchange_s(a.cluster, b.cluster, self.dp * self.message_bytes))
            elif cost_table.virtual:
                found.append(0.0)
            else:
                near = 2 * cost_table.num_chips * self.dp <= a.group.chips_per_node
                found.append(
                    send_s(
                        cost_table.host.topology, self.message_bytes / cost_table.num_chips, same_node=near
                    )
                )
        return tuple(found)

    def in_flight(self, stage: int) -> int:
        """Return the most micro-batches that a stage holds at once."""
        after = self.num_stages - stage - 1
        return 2 * after + 1 if self.schedule == "overlapped" else after + 1
