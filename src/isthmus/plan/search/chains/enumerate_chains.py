"""`Chains`: every pipeline over a replica group, in the order of lower bounds, generated on demand.

The bounds need no split: a pipeline's interval is at least what all its chips together need for the model,
and what its messages occupy a link; its first micro-batch takes at least what its fastest chips would. A heap
holds whole groups of pipelines: first those of one choice of degrees and number of replicas, then those of
each number of stages, then each order of slots. Bounds of groups prune most pipelines before they are
generated, and what order and schedule do not change is computed once.
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
    """A pipeline apart from order and schedule."""

    # Cost table of each slot of the replica group.
    seats: tuple[Seat, ...]
    dp: int
    # Number of stages at each slot.
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of a replica group's slots, and the cost of messages along it."""

    spots: tuple[Spot, ...]
    # Index of each slot in the replica group.
    places: tuple[int, ...]
    # Whether a pipeline may visit each slot once.
    once: bool
    # Whether a pipeline may end at the first slot again.
    back: bool
    # Delay of all hops; `message_s` and `wire_s` (slowest link) are one replica's message time.
    delay_s: float
    message_s: float
    wire_s: float

    def beside_s(self, seats: Sequence[Seat], dp: int) -> float:
        """Return the seconds of a micro-batch beside its layers: embedding, head and hops of all replicas."""
        first, last = seats[self.places[0]], seats[self.places[-1]]
        end_s = last.end_s
        if self.back:
            end_s = min(end_s, first.end_s) if self.once else first.end_s
        return 2 * (self.delay_s + dp * self.message_s) + first.start_s + end_s


@dataclass
class Chains:
    """The pipelines over all slots of a replica group."""

    island: tuple[Spot, ...]
    orders: Sequence[Order]
    # Combinations of degrees: a cost table for each slot.
    cuts: Sequence[tuple[Seat, ...]]
    # Micro-batches of all replicas.
    micro_batches: int
    numbers: Numbers
    # Whether numbers of replicas and stages are thinned further.
    coarse: bool
    shape: Callable[[Sequence[Segment], int, str], Shape]

    def by_end(self, limit_s: float = math.inf) -> Ranking:
        """Return the pipelines by a lower bound on the batch's end alone; may omit those above `limit_s`."""
        total = self.micro_batches

        def end_s(dp: int, first_s: float, interval_s: float) -> float:
            return first_s + (-(-total // dp) - 1) * interval_s

        return Ranking(self._all(limit_s), end_s, limit_s, alone=True)

    def ranked(self, worth: Worth) -> Ranking:
        """Return the pipelines by ascending rank."""
        return Ranking(self._all(math.inf), worth)

    def every(self) -> Iterator[Bounded]:
        """Yield all pipelines, order by order."""
        for order in self.orders:
            for group in replace(self, orders=[order])._all(math.inf):
                yield from group.chains

    def _all(self, limit_s: float) -> list[Family]:
        """Return the pipelines by degrees and number of replicas, if these can meet `limit_s`."""
        if not self.orders or self.micro_batches * min(one.wire_s for one in self.orders) >= limit_s:
            return []
        return [one for cut in self._cuts if cut.least_s < limit_s for one in cut.families]

    @cached_property
    def _cuts(self) -> list[_Cut]:
        return [_Cut(self, cost_tables) for cost_tables in self.cuts]

    def by_number(self, seats: tuple[Seat, ...], layer_s: tuple[float, ...], kin: Kin) -> list[Family]:
        """Return one group per number of stages for one choice of degrees and number of replicas.

        Skips those with more chips than allowed. The bounds count chips and messages.
        """
        most, dp = self.numbers.limits.max_chips, kin.dp
        task, least_s, count, found = seats[0].task, min(layer_s), len(self.orders), []
        layers = task.profile.num_layers
        rates, chips = (
            [1 / (layers * each_s) for each_s in layer_s],
            [dp * cost_table.num_chips for cost_table in seats],
        )
        overhead_s = min(order.beside_s(seats, dp) for order in self.orders)
        wire_s = dp * min(order.wire_s for order in self.orders)
        for stages in kin.stages:
            if most and sum(map(mul, stages, chips)) > most:
                continue
            first_s = layers * least_s + overhead_s
            if task.equal_layers:  # one layer per stage, the others on the fastest chips
                first_s += sum(map(mul, stages, layer_s)) - sum(stages) * least_s
            interval_s = max(1 / sum(map(mul, stages, rates)), wire_s)
            parts = partial(self._closer, seats, layer_s, dp, stages, first_s, overhead_s, wire_s)
            found.append(Family(dp, first_s, interval_s, count, parts))
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
        """Return the group with these numbers of stages under tighter bounds: stages hold whole layers."""
        one = Numbered(seats, dp, stages)
        task, layers = seats[0].task, seats[0].task.profile.num_layers
        kinds, last_s = list(zip(stages, layer_s, strict=True)), 0.0
        if not any(slot.members for slot in self.island):
            largest, zero = -(-layers // sum(stages)), self.numbers.limits.zero
            last_s = min(cost_table.least_last_s(largest, dp, zero) for cost_table in seats)
        if task.equal_layers:
            interval_s = least_pace_s(layers, kinds)
        else:
            interval_s = layers / sum(count / each_s for count, each_s in kinds)
        wire_interval_s = max(interval_s, wire_s)

        def alone() -> float:
            repeats = -(-self.micro_batches // dp) - 1
            return least_end_s(layers, kinds, repeats, wire_interval_s) + last_s + beside_s

        parts = partial(self._by_order, one, first_s - beside_s + last_s, interval_s)
        weighed = alone if task.equal_layers else None
        return [Family(dp, first_s + last_s, wire_interval_s, len(self.orders), parts, weighed)]

    def _by_order(self, one: Numbered, first_s: float, pace_s: float) -> list[Bounded]:
        found = []
        for order in self.orders:
            if order.once or one.stages[order.places[0]] > 1:
                wire_interval_s = max(pace_s, one.dp * order.wire_s)
                made = partial(self.made, one, order)
                found.append(
                    Bounded(one.dp, first_s + order.beside_s(one.seats, one.dp), wire_interval_s, made)
                )
        return found

    def made(self, one: Numbered, order: Order, schedule: str) -> Shape:
        """Return the pipeline for a schedule."""
        segments = [
            Segment(slot, one.seats[i], one.stages[i])
            for slot, i in zip(order.spots, order.places, strict=True)
        ]
        shape = self.shape(segments, one.dp, schedule)
        if order.back:
            shape.back, shape.once = self.numbers.back(segments[0].stages), order.once
        return shape


class _Cut:
    """The pipelines of one choice of degrees; `least_s` is what all chips need for all micro-batches."""

    def __init__(self, chains: Chains, seats: tuple[Seat, ...]) -> None:
        self._chains, self._seats = chains, seats
        self._layers = seats[0].task.profile.num_layers
        self._layer_s = tuple(cost_table.layer_s(seats[0]) for cost_table in seats)
        slots = zip(chains.island, seats, strict=True)
        self._room = [slot.places(cost_table.num_chips) for slot, cost_table in slots]
        rate = self._rate(self._room)
        self.least_s = chains.micro_batches / rate if rate else math.inf

    def _rate(self, stages: Sequence[int]) -> float:
        each = (count / layer_s for count, layer_s in zip(stages, self._layer_s, strict=True))
        return sum(each) / self._layers

    @cached_property
    def families(self) -> list[Family]:
        """The pipelines by number of replicas."""
        chains, found = self._chains, list[Family]()
        for count_group in chains.numbers.of(self._room, chains.micro_batches, chains.coarse):
            first_s, interval_s = self._layers * min(self._layer_s), 1 / self._rate(count_group.most)
            count = len(count_group.stages) * len(chains.orders)
            parts = partial(chains.by_number, self._seats, self._layer_s, count_group)
            found.append(Family(count_group.dp, first_s, interval_s, count, parts))
        return found
