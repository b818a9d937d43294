"""`Space`: what may vary, and every chain of stages over an island of node groups.

A dimension is enumerated whole where it is small and thinned where it is not; a search that met such a one
does not claim to have been exhaustive (`whole`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.plan.memory.stage_memory import Degrees
from isthmus.plan.search.chains.chain_shape import Shape
from isthmus.plan.search.chains.degrees import Numbers
from isthmus.plan.search.chains.enumerate_chains import Chains, Order
from isthmus.plan.search.chains.slot_orders import MAX_ORDERED, orders, returns
from isthmus.plan.search.chains.stage_layout import Segment
from isthmus.plan.search.costs.gradient_ring import ring_s
from isthmus.plan.search.costs.limits import Limits
from isthmus.plan.search.costs.local_steps import local_ring_s
from isthmus.plan.search.costs.routes import Ways
from isthmus.plan.search.costs.slots import Spot, flat
from isthmus.plan.search.costs.stage_costs import Seat
from isthmus.plan.search.costs.task import Task

MANY_CHIPS = 256
"""Islands of three and more spots with more chips than this are cut alike everywhere."""

MANY_CUTS = 64
"""Of at most so many combinations of cuts of an island's spots all are tried."""

LONG_SEQUENCE = 16384
"""Context parallelism is considered from this length on."""


@dataclass
class Space:
    """Seats and chains of one job on one pool. `thinned` turns true once a dimension was not tried whole."""

    task: Task
    ways: Ways
    limits: Limits
    thrifty: bool = False
    thinned: bool = False
    _seats: dict[tuple[object, ...], Seat] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> Numbers:
        """The numbers of stages and replicas."""
        return Numbers(self.limits, self.task.profile.num_layers, self.thrifty)

    @property
    def whole(self) -> bool:
        """Whether no dimension has been thinned."""
        return not (self.thinned or self.numbers.thinned)

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
        several = len({spot.cluster for spot in flat(spots)}) > 1
        if several and self.limits.overlap:
            return ("1f1b", "overlapped")
        return ("1f1b",)

    def cuts(self, spot: Spot) -> tuple[Degrees, ...]:
        """Return the ways to cut a stage at a spot: a stage stays within a node."""
        limits, profile = self.limits, self.task.profile
        node = min(spot.group.chips_per_node, spot.chips)
        layer = profile.layers[0]
        if limits.executable:
            return self._shares(node, layer.attention.core.num_kv_heads if layer.attention.core else 1)
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

    def _shares(self, node: int, heads: int) -> tuple[Degrees, ...]:
        """Return the cuts that our runtime runs on `node` chips: each takes whole key and value heads."""
        tps = [self.limits.tp] if self.limits.tp else [1 << i for i in range(node.bit_length())]
        fitting = [tp for tp in tps if tp <= node and heads % tp == 0]
        tokens = self.task.sequence_length
        return tuple(Degrees(tp=tp, sp=tp > 1 and tokens % tp == 0) for tp in fitting)

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

    def alike(self, island: Sequence[Spot]) -> tuple[object, ...]:
        """Return what tells the chains of an island, its spots in this order, from those of others."""
        if any(spot.members for spot in island):
            return tuple(map(id, island))
        names = [spot.cluster for spot in island]
        spots = ((spot.kind, spot.chips, spot.reads_data, names.index(spot.cluster)) for spot in island)
        return (*spots, *(self.ways.way(*ends) for ends in itertools.permutations(dict.fromkeys(names), 2)))

    def shape(self, segments: Sequence[Segment], dp: int, schedule: str) -> Shape:
        """Return a chain. A space with costs of its own has its own `seat`, `alike`, `shape` and `ring_s`."""
        return Shape(self.task, segments, dp, schedule, self.limits.zero, self.ways)

    def ring_s(self, islands: Sequence[Sequence[Spot]]) -> float:
        """Return the seconds of the rings over several islands (infinite: not joined, or none to average)."""

        islands = [flat(island) for island in islands]

        def reduce_s(some: Sequence[Sequence[Spot]]) -> float:
            return ring_s(self.task, self.ways, some, self.limits.zero)

        def average_s(some: Sequence[Sequence[Spot]]) -> float:
            return ring_s(self.task, self.ways, some, 0)

        if self.task.local_steps == 1:
            return reduce_s(islands)
        return local_ring_s(islands, self.task.local_steps, reduce_s, average_s)

    def chains(
        self, island: Sequence[Spot], micro_batch_size: int, micro_batches: int, coarse: bool = False
    ) -> Chains:
        """Return the chains that use all spots of an island, at most `micro_batches` replicas of each.

        Those that return to their start with some stages are the `variants` of one shape. `coarse` thins
        numbers of replicas and stages where they are many, and returns.
        """
        orders, cuts = list[Order](), list[tuple[Seat, ...]]()
        mixed = len({spot.group.chip for spot in island}) > 1
        if (self.limits.mixed_chips or not mixed) and all(self.cuts(spot) for spot in island):
            self.thinned = self.thinned or len(island) > MAX_ORDERED
            for chosen in self._cut_choices(island):
                seats = zip(island, chosen, strict=True)
                cuts.append(tuple(self.seat(spot, cut, micro_batch_size) for spot, cut in seats))
            orders = [
                self._order(island, *one, cuts[0][0].message_bytes) for one in self._orders(island, coarse)
            ]
        return Chains(tuple(island), orders, cuts, micro_batches, self.numbers, coarse, self.shape)

    def _order(
        self, island: Sequence[Spot], spots: tuple[Spot, ...], once: bool, back: bool, num_bytes: float
    ) -> Order:
        places = {(spot.cluster, spot.group.name): place for place, spot in enumerate(island)}
        along = self.ways.along(tuple(spot.cluster for spot in spots))
        return Order(
            spots,
            tuple(places[spot.cluster, spot.group.name] for spot in spots),
            once,
            back,
            along.delay_s,
            num_bytes * along.s_per_byte,
            num_bytes * along.slowest_s_per_byte,
        )

    def shapes(
        self, island: Sequence[Spot], micro_batch_size: int, schedule: str, micro_batches: int
    ) -> Iterator[Shape]:
        """Yield every chain that uses all spots of an island, as `chains` has them."""
        for one in self.chains(island, micro_batch_size, micro_batches).every():
            yield one.made(schedule)

    def _orders(self, island: Sequence[Spot], coarse: bool) -> list[tuple[tuple[Spot, ...], bool, bool]]:
        """Return the orders to try: whether each may be passed once, and whether with a return to its start.

        Of three spots, and where layers differ, a chain only returns if none may pass these spots once.
        """
        once = orders(island, self.ways)
        back = [] if self.limits.executable else returns(island, self.ways)
        if back and (coarse or (once and (len(island) > 2 or not self.task.equal_layers))):
            self.thinned, back = True, []
        return [(one, one in once, one in back) for one in dict.fromkeys(once + back)]

    def _cut_choices(self, island: Sequence[Spot]) -> Iterator[tuple[Degrees, ...]]:
        """Yield a cut per spot; in larger islands one per kind of spot, in the largest the same for all."""
        each = [self.cuts(spot) for spot in island]
        few = len(island) <= 2 or sum(spot.chips for spot in island) <= MANY_CHIPS
        if few and math.prod(len(one) for one in each) <= MANY_CUTS:
            yield from itertools.product(*each)
            return
        self.thinned = True
        of_kind = {spot.kind: cuts for spot, cuts in zip(island, each, strict=True)}
        if few and math.prod(len(one) for one in of_kind.values()) <= MANY_CUTS:
            for chosen in itertools.product(*of_kind.values()):
                cut = dict(zip(of_kind, chosen, strict=True))
                yield tuple(cut[spot.kind] for spot in island)
            return
        for base in dict.fromkeys(itertools.chain(*each)):
            yield tuple(base if base in options else options[-1] for options in each)
