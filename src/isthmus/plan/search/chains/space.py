"""`Space`: the search space: every pipeline over a replica group, with its degrees, sizes and schedules.

Small dimensions are enumerated completely, large ones thinned; `whole` tells whether any was thinned.
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
"""Groups of three or more slots with more chips than this use the same degrees everywhere."""

MANY_CUTS = 64
"""Up to this many combinations of degrees over a group's slots are all tried."""

LONG_SEQUENCE = 16384
"""Shortest sequence (tokens) for which context parallelism is tried."""


@dataclass
class Space:
    """Cost tables and pipelines of one job on one pool."""

    task: Task
    ways: Ways
    limits: Limits
    # Whether cost matters: fewer replicas than fit are tried, too.
    thrifty: bool = False
    # Whether some dimension was thinned.
    thinned: bool = False
    _seats: dict[tuple[object, ...], Seat] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> Numbers:
        """The candidate numbers of stages and replicas."""
        return Numbers(self.limits, self.task.profile.num_layers, self.thrifty)

    @property
    def whole(self) -> bool:
        """Whether every dimension was enumerated completely so far."""
        return not (self.thinned or self.numbers.thinned)

    def micro_batch_sizes(self, asked: int, global_batch_size: int) -> tuple[int, ...]:
        """Return the sizes to try: the requested one, and powers of two that divide the batch."""
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
        """Return the schedules to try; overlapping communication pays only across clusters."""
        if self.limits.schedule:
            kept = self.limits.overlap or self.limits.schedule != "overlapped"
            return (self.limits.schedule,) if kept else ()
        several = len({slot.cluster for slot in flat(spots)}) > 1
        if several and self.limits.overlap:
            return ("1f1b", "overlapped")
        return ("1f1b",)

    def cuts(self, spot: Spot) -> tuple[Degrees, ...]:
        """Return the tensor, context and expert parallel degrees to try at a slot, within a node."""
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
        """Return the degrees that the Isthmus runtime supports on `node` chips.

        Each chip takes whole key and value heads.
        """
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
        """Return the cost table for degrees at a slot; slots of one kind share it."""
        key = (*spot.kind, degrees, micro_batch_size)
        if key not in self._seats:
            self._seats[key] = Seat(self.task, spot, degrees, micro_batch_size)
        return self._seats[key]

    def alike(self, island: Sequence[Spot]) -> tuple[object, ...]:
        """Return a key that is equal for replica groups with the same pipelines, slots in this order."""
        if any(slot.members for slot in island):
            return tuple(map(id, island))
        names = [slot.cluster for slot in island]
        slots = ((slot.kind, slot.chips, slot.reads_data, names.index(slot.cluster)) for slot in island)
        return (*slots, *(self.ways.way(*ends) for ends in itertools.permutations(dict.fromkeys(names), 2)))

    def shape(self, segments: Sequence[Segment], dp: int, schedule: str) -> Shape:
        """Return a pipeline shape.

        A space with its own costs overrides `seat`, `alike`, `shape` and `ring_s`.
        """
        return Shape(self.task, segments, dp, schedule, self.limits.zero, self.ways)

    def ring_s(self, islands: Sequence[Sequence[Spot]]) -> float:
        """Return the seconds of the rings over several replica groups.

        Infinite where they are not linked or, with local steps, form one group.
        """

        islands = [flat(replica_group) for replica_group in islands]

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
        """Return the pipelines that use all slots of a replica group.

        Pipelines that return to their first slot are `variants` of one shape. `coarse` thins numbers of
        replicas and stages further, and skips returns.
        """
        orders, cuts = list[Order](), list[tuple[Seat, ...]]()
        mixed = len({slot.group.chip for slot in island}) > 1
        if (self.limits.mixed_chips or not mixed) and all(self.cuts(slot) for slot in island):
            self.thinned = self.thinned or len(island) > MAX_ORDERED
            for chosen in self._cut_choices(island):
                pairs = zip(island, chosen, strict=True)
                cuts.append(tuple(self.seat(slot, cut, micro_batch_size) for slot, cut in pairs))
            orders = [
                self._order(island, *one, cuts[0][0].message_bytes) for one in self._orders(island, coarse)
            ]
        return Chains(tuple(island), orders, cuts, micro_batches, self.numbers, coarse, self.shape)

    def _order(
        self, island: Sequence[Spot], spots: tuple[Spot, ...], once: bool, back: bool, num_bytes: float
    ) -> Order:
        places = {(slot.cluster, slot.group.name): place for place, slot in enumerate(island)}
        along = self.ways.along(tuple(slot.cluster for slot in spots))
        return Order(
            spots,
            tuple(places[slot.cluster, slot.group.name] for slot in spots),
            once,
            back,
            along.delay_s,
            num_bytes * along.s_per_byte,
            num_bytes * along.slowest_s_per_byte,
        )

    def shapes(
        self, island: Sequence[Spot], micro_batch_size: int, schedule: str, micro_batches: int
    ) -> Iterator[Shape]:
        """Yield every pipeline shape that uses all slots of a replica group."""
        for one in self.chains(island, micro_batch_size, micro_batches).every():
            yield one.made(schedule)

    def _orders(self, island: Sequence[Spot], coarse: bool) -> list[tuple[tuple[Spot, ...], bool, bool]]:
        """Return the orders to try as (slots, may visit each once, may return to the first).

        With three or more slots, or unequal layers, returns are tried only where no order visits each slot
        once.
        """
        once = orders(island, self.ways)
        back = [] if self.limits.executable else returns(island, self.ways)
        if back and (coarse or (once and (len(island) > 2 or not self.task.equal_layers))):
            self.thinned, back = True, []
        return [(one, one in once, one in back) for one in dict.fromkeys(once + back)]

    def _cut_choices(self, island: Sequence[Spot]) -> Iterator[tuple[Degrees, ...]]:
        """Yield degrees per slot; in larger groups per kind of slot, in the largest the same everywhere."""
        each = [self.cuts(slot) for slot in island]
        few = len(island) <= 2 or sum(slot.chips for slot in island) <= MANY_CHIPS
        if few and math.prod(len(one) for one in each) <= MANY_CUTS:
            yield from itertools.product(*each)
            return
        self.thinned = True
        of_kind = {slot.kind: cuts for slot, cuts in zip(island, each, strict=True)}
        if few and math.prod(len(one) for one in of_kind.values()) <= MANY_CUTS:
            for chosen in itertools.product(*of_kind.values()):
                cut = dict(zip(of_kind, chosen, strict=True))
                yield tuple(cut[slot.kind] for slot in island)
            return
        for base in dict.fromkeys(itertools.chain(*each)):
            yield tuple(base if base in options else options[-1] for options in each)
