"""`Chains`: every chain of stages over an island, the most promising first, opened only as far as asked.

What a chain costs at least needs no split: its pace is at least what all its chips together need for the
model, and what its messages occupy a wire; its first micro-batch takes at least what the fastest of its chips
would. Chains wait in a heap by what they promise, whole families as one: those of one cut and number of
replicas; when they come up, those of each number of stages; then each order of the spots. So most are set
aside by the bound of their family, and what order and schedule do not change is computed once for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import mul
from typing import NamedTuple

from isthmus.plan.search.chains.chain_shape import Shape
from isthmus.plan.search.chains.degrees import Kin, Numbers
from isthmus.plan.search.chains.lower_bounds import least_end_s, least_pace_s
from isthmus.plan.search.chains.ranking import Bounded, Family, Ranking, Worth
from isthmus.plan.search.chains.stage_layout import Segment
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_costs import Seat


class Numbered(NamedTuple):
    """A seat for each spot of an island, numbers of replicas and of stages."""

    seats: tuple[Seat, ...]
    dp: int
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of an island's spots, which are at these `places` in it, and what a message takes along them.

    `once`: each spot may be passed once; `back`: a chain may end at the first again. `message_s` and `wire_s`
    (on the slowest wire) are those of one replica's message, beside its `delay_s`.
    """

    spots: tuple[Spot, ...]
    places: tuple[int, ...]
    once: bool
    back: bool
    delay_s: float
    message_s: float
    wire_s: float

    def beside_s(self, seats: Sequence[Seat], dp: int) -> float:
        """Return the seconds of a micro-batch beside its layers: at the ends, and on the way, all at once."""
        first, last = seats[self.places[0]], seats[self.places[-1]]
        end_s = last.end_s
        if self.back:
            end_s = min(end_s, first.end_s) if self.once else first.end_s
        return 2 * (self.delay_s + dp * self.message_s) + first.start_s + end_s


@dataclass
class Chains:
    """The chains over all spots of an island, for up to `micro_batches`; `cuts` has a seat for each spot."""

    island: tuple[Spot, ...]
    orders: Sequence[Order]
    cuts: Sequence[tuple[Seat, ...]]
    micro_batches: int
    numbers: Numbers
    coarse: bool
    shape: Callable[[Sequence[Segment], int, str], Shape]

    def by_end(self, limit_s: float = math.inf) -> Ranking:
        """Return the chains by the least seconds in which each of them alone ends the batch.

        Without some that cannot do it within the limit.
        """
        total = self.micro_batches

        def end_s(dp: int, first_s: float, pace_s: float) -> float:
            return first_s + (-(-total // dp) - 1) * pace_s

        return Ranking(self._all(limit_s), end_s, limit_s, alone=True)

    def ranked(self, worth: Worth) -> Ranking:
        """Return the chains by rising worth."""
        return Ranking(self._all(math.inf), worth)

    def every(self) -> Iterator[Bounded]:
        """Yield all chains, order by order."""
        for order in self.orders:
            for family in replace(self, orders=[order])._all(math.inf):
                yield from family.chains

    def _all(self, limit_s: float) -> list[Family]:
        """Return those of every cut by number of replicas, but of cuts whose chips together take too long."""
        if not self.orders or self.micro_batches * min(one.wire_s for one in self.orders) >= limit_s:
            return []
        return [one for cut in self._cuts if cut.least_s < limit_s for one in cut.families]

    @cached_property
    def _cuts(self) -> list[_Cut]:
        return [_Cut(self, seats) for seats in self.cuts]

    def by_number(self, seats: tuple[Seat, ...], layer_s: tuple[float, ...], kin: Kin) -> list[Family]:
        """Return the chains of each of these numbers of stages, as far as so many chips may be used.

        Those of one cut and number of replicas. At first they are bounded by what chips and messages take.
        """
        most, dp = self.numbers.limits.max_chips, kin.dp
        task, least_s, count, found = seats[0].task, min(layer_s), len(self.orders), []
        layers = task.profile.num_layers
        rates, chips = [1 / (layers * each_s) for each_s in layer_s], [dp * seat.num_chips for seat in seats]
        beside_s = min(order.beside_s(seats, dp) for order in self.orders)
        wire_s = dp * min(order.wire_s for order in self.orders)
        for stages in kin.stages:
            if most and sum(map(mul, stages, chips)) > most:
                continue
            first_s = layers * least_s + beside_s
            if task.equal_layers:  # a layer at each stage, the others where they are fastest
                first_s += sum(map(mul, stages, layer_s)) - sum(stages) * least_s
            pace_s = max(1 / sum(map(mul, stages, rates)), wire_s)
            parts = partial(self._closer, seats, layer_s, dp, stages, first_s, beside_s, wire_s)
            found.append(Family(dp, first_s, pace_s, count, parts))
        return found

    def _closer(
        self,
        seats: tuple[Seat, ...],
        layer_s: tuple[float, ...],
        dp: int,
        stages: tuple[int, ...],
        first_s: float,
        beside_s: float,
        wire_s: float,
    ) -> list[Family]:
        """Return the chains with these numbers of stages, bounded closer: layers are whole."""
        one = Numbered(seats, dp, stages)
        task, layers = seats[0].task, seats[0].task.profile.num_layers
        kinds, last_s = list(zip(stages, layer_s, strict=True)), 0.0
        if not any(spot.members for spot in self.island):
            largest, zero = -(-layers // sum(stages)), self.numbers.limits.zero
            last_s = min(seat.least_last_s(largest, dp, zero) for seat in seats)
        if task.equal_layers:
            pace_s = least_pace_s(layers, kinds)
        else:
            pace_s = layers / sum(count / each_s for count, each_s in kinds)
        paced_s = max(pace_s, wire_s)

        def alone() -> float:
            repeats = -(-self.micro_batches // dp) - 1
            return least_end_s(layers, kinds, repeats, paced_s) + last_s + beside_s

        parts = partial(self._by_order, one, first_s - beside_s + last_s, pace_s)
        weighed = alone if task.equal_layers else None
        return [Family(dp, first_s + last_s, paced_s, len(self.orders), parts, weighed)]

    def _by_order(self, one: Numbered, first_s: float, pace_s: float) -> list[Bounded]:
        found = []
        for order in self.orders:
            if order.once or one.stages[order.places[0]] > 1:
                paced_s = max(pace_s, one.dp * order.wire_s)
                made = partial(self.made, one, order)
                found.append(Bounded(one.dp, first_s + order.beside_s(one.seats, one.dp), paced_s, made))
        return found

    def made(self, one: Numbered, order: Order, schedule: str) -> Shape:
        """Return a chain under a schedule."""
        segments = [
            Segment(spot, one.seats[i], one.stages[i])
            for spot, i in zip(order.spots, order.places, strict=True)
        ]
        shape = self.shape(segments, one.dp, schedule)
        if order.back:
            shape.back, shape.once = self.numbers.back(segments[0].stages), order.once
        return shape


class _Cut:
    """The chains of one cut; `least_s` is what all chips together need for all micro-batches."""

    def __init__(self, chains: Chains, seats: tuple[Seat, ...]) -> None:
        self._chains, self._seats = chains, seats
        self._layers = seats[0].task.profile.num_layers
        self._layer_s = tuple(seat.layer_s(seats[0]) for seat in seats)
        spots = zip(chains.island, seats, strict=True)
        self._room = [spot.places(seat.num_chips) for spot, seat in spots]
        rate = self._rate(self._room)
        self.least_s = chains.micro_batches / rate if rate else math.inf

    def _rate(self, stages: Sequence[int]) -> float:
        each = (count / layer_s for count, layer_s in zip(stages, self._layer_s, strict=True))
        return sum(each) / self._layers

    @cached_property
    def families(self) -> list[Family]:
        """Its chains by number of replicas."""
        chains, found = self._chains, list[Family]()
        for kin in chains.numbers.of(self._room, chains.micro_batches, chains.coarse):
            first_s, pace_s = self._layers * min(self._layer_s), 1 / self._rate(kin.most)
            count = len(kin.stages) * len(chains.orders)
            parts = partial(chains.by_number, self._seats, self._layer_s, kin)
            found.append(Family(kin.dp, first_s, pace_s, count, parts))
        return found
