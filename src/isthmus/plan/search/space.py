"""The space of plans: what may vary (`Limits`), and every chain of stages over an island of node groups.

A dimension is enumerated whole where it is small and thinned where it is not; `Thinned` says so, and a search
that met it does not claim to have been exhaustive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul

from isthmus.plan.memory.stage import Degrees
from isthmus.plan.search.layout import ring_s
from isthmus.plan.search.local_steps import local_ring_s
from isthmus.plan.search.seat import Seat, Task, Zero
from isthmus.plan.search.shape import Segment, Shape
from isthmus.plan.search.spots import Spot
from isthmus.plan.search.ways import Ways

WHOLE = 96
"""Numbers of stages per spot are all tried where there are at most so many combinations."""

MAX_ORDERED = 3
"""Islands of at most so many spots are tried in every order."""

MANY_CHIPS = 256
"""Islands of three and more spots with more chips than this are cut alike everywhere."""

DENSE_REPLICAS = 16
"""Numbers of replicas are all tried up to this, beyond it in steps of `REPLICA_STEP`."""

REPLICA_STEP = 1.1
COARSE_STEP = 1.5

LONG_SEQUENCE = 16384
"""Context parallelism is considered from this length on."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the caller fixes. None leaves a degree free; `executable` admits what our runtime runs.

    `largest_micro_batch` bounds the micro-batch sizes that are tried. `even_batches` gives every replica as
    many micro-batches (to within one), for frameworks that deal samples evenly. Without `overlap` no
    schedule is tried that overlaps communication with computation.
    """

    executable: bool = False
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    zero: Zero = 1
    max_chips: int | None = None
    mixed_chips: bool = True
    largest_micro_batch: int = 8
    even_batches: bool = False
    overlap: bool = True


@dataclass
class Space:
    """Seats and chains of one job on one pool. `thinned` turns true once a dimension was not tried whole."""

    task: Task
    ways: Ways
    limits: Limits
    thrifty: bool = False
    thinned: bool = False
    _seats: dict[tuple[object, ...], Seat] = field(default_factory=dict)
    _known_numbers: dict[tuple[object, ...], tuple[tuple[int, tuple[int, ...]], ...]] = field(
        default_factory=dict
    )

    def micro_batch_sizes(self, asked: int, global_batch_size: int) -> tuple[int, ...]:
        """Return the sizes to try: the one asked for, and powers of two that divide the batch."""
        fixed = self.limits.micro_batch_size or (asked if self.limits.executable else None)
        if fixed:
            return (fixed,) if global_batch_size % fixed == 0 else ()
        sizes, size = {asked}, 1
        while size <= min(self.limits.largest_micro_batch, global_batch_size):
            if global_batch_size % size == 0:
                sizes.add(size)
            size *= 2
        return tuple(sorted(sizes))

    def schedules(self, spots: Sequence[Spot]) -> tuple[str, ...]:
        """Return the schedules to try: exchanges are only worth overlapping where they cross the WAN."""
        if self.limits.schedule:
            kept = self.limits.overlap or self.limits.schedule != "overlapped"
            return (self.limits.schedule,) if kept else ()
        several = len({spot.cluster for spot in spots}) > 1
        if several and self.limits.overlap:
            return ("1f1b", "overlapped")
        return ("1f1b",)

    def cuts(self, spot: Spot) -> tuple[Degrees, ...]:
        """Return the ways to cut a stage at a spot: a stage stays within a node."""
        limits, profile = self.limits, self.task.profile
        if limits.executable:
            return (Degrees(),)
        node = min(spot.group.chips_per_node, spot.chips)
        layer = profile.layers[0]
        heads = layer.attention.core.num_heads if layer.attention.core else 1
        experts = max((one.feed_forward.num_experts for one in profile.layers), default=0)
        powers = [1 << i for i in range(node.bit_length()) if 1 << i <= node]
        tps = [limits.tp] if limits.tp else [n for n in powers if heads % n == 0]
        long = self.task.sequence_length >= LONG_SEQUENCE
        cps = [limits.cp] if limits.cp else [n for n in powers if n <= 4] if long else [1]
        found = []
        for tp, cp in itertools.product(tps, cps):
            if tp * cp > node:
                continue
            for ep in self._expert_degrees(experts, tp * cp):
                found.append(Degrees(tp=tp, cp=cp, ep=ep, sp=tp > 1))
        return tuple(found)

    def _expert_degrees(self, experts: int, chips: int) -> list[int]:
        if self.limits.ep:
            return [self.limits.ep] if self.limits.ep <= chips or experts else []
        if not experts:
            return [1]
        return sorted({1, math.gcd(experts, chips)})

    def seat(self, spot: Spot, degrees: Degrees, micro_batch_size: int) -> Seat:
        """Return the seat of a cut at a spot; spots of one kind share it."""
        key = (*spot.kind, degrees, micro_batch_size)
        if key not in self._seats:
            self._seats[key] = Seat(self.task, spot, degrees, micro_batch_size)
        return self._seats[key]

    def shape(self, segments: Sequence[Segment], dp: int, schedule: str) -> Shape:
        """Return a chain. A space with costs of its own has its own `seat`, `shape` and `ring_s`."""
        return Shape(self.task, segments, dp, schedule, self.limits.zero, self.ways)

    def ring_s(self, islands: Sequence[Sequence[Spot]]) -> float:
        """Return the seconds of the rings over several islands (infinite: not joined, or none to average)."""

        def reduce_s(some: Sequence[Sequence[Spot]]) -> float:
            return ring_s(self.task, self.ways, some, self.limits.zero)

        def average_s(some: Sequence[Sequence[Spot]]) -> float:
            return ring_s(self.task, self.ways, some, 0)

        if self.task.local_steps == 1:
            return reduce_s(islands)
        return local_ring_s(islands, self.task.local_steps, reduce_s, average_s)

    def orders(self, island: Sequence[Spot]) -> list[tuple[Spot, ...]]:
        """Return the orders in which a pipeline may pass through an island's spots, each cluster once."""
        clusters = list(dict.fromkeys(spot.cluster for spot in island))
        inside = {name: [spot for spot in island if spot.cluster == name] for name in clusters}
        if len(island) <= MAX_ORDERED:
            chains: list[tuple[str, ...]] = list(itertools.permutations(clusters))
        else:
            self.thinned = True
            chains = [self._near_chain(clusters, start) for start in clusters]
        found = []
        for chain in dict.fromkeys(chains):
            if any(self.ways.missing(a, b) for a, b in itertools.pairwise(chain)):
                continue
            each = [
                list(itertools.permutations(inside[name]))
                if len(island) <= MAX_ORDERED
                else [tuple(sorted(inside[name], key=lambda s: -s.chip.memory_bytes))]
                for name in chain
            ]
            for parts in itertools.product(*each):
                order = tuple(itertools.chain(*parts))
                if order[0].reads_data and order[-1].reads_data:
                    found.append(order)
        return found

    def _near_chain(self, clusters: Sequence[str], start: str) -> tuple[str, ...]:
        """Return a path that always goes on over the fastest link."""
        chain, left = [start], [name for name in clusters if name != start]
        while left:
            left.sort(key=lambda name: -self.ways.rate(chain[-1], name))
            chain.append(left.pop(0))
        return tuple(chain)

    def shapes(
        self,
        island: Sequence[Spot],
        micro_batch_size: int,
        schedule: str,
        micro_batches: int,
        limit_s: float = math.inf,
        coarse: bool = False,
    ) -> Iterator[Shape]:
        """Yield every chain that uses all spots of an island, at most `micro_batches` replicas of it.

        Those that cannot end `micro_batches` on their own before `limit_s` are left out. `coarse` thins
        numbers of replicas and stages where they are many.
        """
        if not self.limits.mixed_chips and len({spot.group.chip for spot in island}) > 1:
            return
        if not all(self.cuts(spot) for spot in island):
            return
        layers = self.task.profile.num_layers
        for order in self.orders(island):
            seat = self.seat(order[0], self.cuts(order[0])[0], micro_batch_size)
            wire_s = seat.message_bytes * self.ways.along(tuple(s.cluster for s in order)).slowest_s_per_byte
            if micro_batches * wire_s >= limit_s:
                continue
            for cuts in self._cut_choices(order):
                seats = [self.seat(*one, micro_batch_size) for one in zip(order, cuts, strict=True)]
                room = [places(spot, seat.num_chips) for spot, seat in zip(order, seats, strict=True)]
                speeds = [1 / (layers * seat.layer_s(seats[0])) for seat in seats]
                least_s = min(1 / speed for speed in speeds)
                most = sum(one * speed for one, speed in zip(room, speeds, strict=True))
                if least_s + (micro_batches - most * least_s) / most >= limit_s:
                    continue
                for dp, stages in self._numbers(room, micro_batches, coarse):
                    if limit_s < math.inf:
                        pace_s = 1 / sum(map(mul, stages, speeds))
                        if least_s + (-(-micro_batches // dp) - 1) * pace_s >= limit_s:
                            continue
                    shape = self.shape(list(map(Segment, order, seats, stages)), dp, schedule)
                    if not self.limits.max_chips or shape.num_chips <= self.limits.max_chips:
                        yield shape

    def _cut_choices(self, order: Sequence[Spot]) -> Iterator[tuple[Degrees, ...]]:
        """Yield a cut per spot; in large islands all spots have the same, as far as they have it."""
        each = [self.cuts(spot) for spot in order]
        few = len(order) <= 2 or sum(spot.chips for spot in order) <= MANY_CHIPS
        if few and math.prod(len(one) for one in each) <= 256:
            yield from itertools.product(*each)
            return
        self.thinned = True
        for base in dict.fromkeys(itertools.chain(*each)):
            alike = [base if base in options else options[-1] for options in each]
            yield tuple(alike)

    def _numbers(
        self, room: Sequence[int], micro_batches: int, coarse: bool
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the (replicas, stages per spot) that fit `room` places per spot."""
        key = (tuple(room), micro_batches, coarse)
        if key not in self._known_numbers:
            found: dict[tuple[int, tuple[int, ...]], None] = {}
            for dp, stages in self._all_numbers(room, coarse):
                pp = sum(stages)
                if pp <= self.task.profile.num_layers and self.limits.pp in (None, pp):
                    found |= dict.fromkeys((one, stages) for one in self.replicas(dp, micro_batches))
            self._known_numbers[key] = tuple(found)
        return self._known_numbers[key]

    def replicas(self, room: int, micro_batches: int) -> tuple[int, ...]:
        """Return the numbers of replicas to try where at most `room` fit, for so many micro-batches."""
        most = min(room, micro_batches)
        if self.limits.executable:
            return (1,)
        if self.limits.dp:
            return (self.limits.dp,) if self.limits.dp <= most else ()
        return self._fewer(most) if self.thrifty or self.limits.max_chips else (most,)

    @staticmethod
    def _fewer(most: int) -> tuple[int, ...]:
        return tuple(
            dict.fromkeys([most, *(1 << i for i in reversed(range(most.bit_length())) if 1 << i < most)])
        )

    def _all_numbers(self, room: Sequence[int], coarse: bool) -> Iterator[tuple[int, tuple[int, ...]]]:
        layers = self.task.profile.num_layers
        most = [min(one, layers) for one in room]
        if min(most) < 1:
            return
        if self.limits.pp:
            for stages in self._splits(self.limits.pp, most):
                yield min(r // s for r, s in zip(room, stages, strict=True)), stages
            return
        if math.prod(most) <= (400 if self.limits.executable else WHOLE):
            for stages in itertools.product(*(range(1, one + 1) for one in most)):
                yield min(r // s for r, s in zip(room, stages, strict=True)), stages
            return
        self.thinned = True
        numbers = sorted({r // s for r in room for s in range(1, min(r, layers) + 1)})
        for dp in reversed(_spread([dp for dp in numbers if dp <= min(room)], coarse)):
            fillings = self._fillings(room, dp)
            yield from ((dp, stages) for stages in itertools.islice(fillings, 1 if coarse else None))

    def _splits(self, pp: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the ways to deal `pp` stages to spots of at most so many, each some: evenly few of many."""
        count = math.comb(pp - 1, len(most) - 1)
        step = max(1, count // WHOLE)
        self.thinned = self.thinned or step > 1
        for ends in itertools.islice(itertools.combinations(range(1, pp), len(most) - 1), None, None, step):
            stages = tuple(b - a for a, b in itertools.pairwise((0, *ends, pp)))
            if all(one <= limit for one, limit in zip(stages, most, strict=True)):
                yield stages

    def _fillings(self, room: Sequence[int], dp: int) -> Iterator[tuple[int, ...]]:
        """Yield numbers of stages with which `dp` replicas fill the spots: whole, one fewer, half."""
        layers = self.task.profile.num_layers
        full = [min(layers, one // dp) for one in room]
        if sum(full) > layers:
            for part in (1.0, 0.5, 0.25, 0.125):
                yield tuple(max(1, math.floor(one * part * layers / sum(full))) for one in full)
            return
        choices = [sorted({one, max(1, one - 1), (one + 1) // 2}, reverse=True) for one in full]
        if len(room) <= 2:
            yield from itertools.product(*choices)
            return
        yield tuple(full)
        yield tuple(max(1, one - 1) for one in full)
        yield tuple((one + 1) // 2 for one in full)


def _spread(numbers: Sequence[int], coarse: bool) -> list[int]:
    """Return the small of rising numbers, and of the large ones those at least a step apart, the last too."""
    found: list[int] = []
    for number in numbers:
        dense = number <= (2 if coarse else DENSE_REPLICAS)
        if not found or dense or number >= found[-1] * (COARSE_STEP if coarse else REPLICA_STEP):
            found.append(number)
    if numbers and found[-1] != numbers[-1]:
        found.append(numbers[-1])
    return found


def places(spot: Spot, chips: int) -> int:
    """Return how many stages of `chips` chips a spot holds, none of them over two nodes."""
    node = spot.group.chips_per_node
    return spot.chips // node * (node // chips) + spot.chips % node // chips
