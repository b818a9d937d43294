"""`Line`: where the stages of a chain are: segments at spots in pipeline order, `dp` times side by side."""

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
    """Consecutive stages at one spot."""

    spot: Spot
    seat: Seat
    stages: int


class Line:
    """Segments in pipeline order, `dp` times side by side, under a schedule.

    It stands for its `variants`, too: chains that end where they began, with so many (`back`) of the first
    segment's stages at the end. Without `once` it stands for them alone. What bounds it bounds them.
    """

    back: tuple[int, ...] = ()
    once: bool = True

    def __init__(
        self, task: Task, segments: Sequence[Segment], dp: int, schedule: str, zero: Zero, ways: Ways
    ) -> None:
        self.task, self.segments, self.dp = task, tuple(segments), dp
        self.schedule, self.zero, self.ways = schedule, zero if dp > 1 else 0, ways
        self.asked_zero = zero

    @property
    def variants(self) -> Iterator[Self]:
        """The chains that this shape stands for."""
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
        """The seat of every stage."""
        return tuple(one.seat for one in self.segments for _ in range(one.stages))

    @cached_property
    def spots(self) -> tuple[Spot, ...]:
        """The spot of every stage."""
        return tuple(one.spot for one in self.segments for _ in range(one.stages))

    @cached_property
    def pooled(self) -> bool:
        """Whether a spot is a pool, so that replicas differ in where their stages are."""
        return any(one.spot.members for one in self.segments)

    @cached_property
    def parts(self) -> tuple[Self, ...]:
        """The replicas that are alike in where their stages are, as shapes of their own."""
        if not self.pooled:
            return (self,)
        kinds = Counter(zip(*map(self._filled, self.segments), strict=True))
        found = []
        for row, count in kinds.items():
            stages = [(spot, one.seat) for one, part in zip(self.segments, row, strict=True) for spot in part]
            runs = [(key, len(list(some))) for key, some in itertools.groupby(stages)]
            segments = [Segment(spot, seat, number) for (spot, seat), number in runs]
            found.append(type(self)(self.task, segments, count, self.schedule, self.asked_zero, self.ways))
        return tuple(found)

    def _filled(self, segment: Segment) -> list[tuple[Spot, ...]]:
        """Return by replica the spot of each stage of a segment: a pool is filled stage by stage."""
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
        """What its messages take along the clusters that it passes."""
        return self.ways.along(tuple(one.spot.cluster for one in self.segments))

    @property
    def wire_s(self) -> float:
        """Seconds for which the slowest wire is occupied by one micro-batch of every replica."""
        return self.dp * self.message_bytes * self.along.slowest_s_per_byte

    @cached_property
    def hops_s(self) -> tuple[float, ...]:
        """Seconds of an exchange at each stage boundary."""
        found = []
        for i in range(self.num_stages - 1):
            a, b, seat = self.spots[i], self.spots[i + 1], self.seats[i]
            if a.cluster != b.cluster:
                found.append(self.ways.exchange_s(a.cluster, b.cluster, self.dp * self.message_bytes))
            elif seat.virtual:
                found.append(0.0)
            else:
                near = 2 * seat.num_chips * self.dp <= a.group.chips_per_node
                found.append(send_s(seat.host.topology, self.message_bytes / seat.num_chips, same_node=near))
        return tuple(found)

    def in_flight(self, stage: int) -> int:
        """Return the micro-batches that a stage keeps at once, at most."""
        after = self.num_stages - stage - 1
        return 2 * after + 1 if self.schedule == "overlapped" else after + 1
