"""`Chances`: optimistic relaxations of replica groups, used to prove `bound_s`; no plan exceeds them.

A relaxation is a number of replicas with the most stages that fit at each slot, for fixed degrees or for all
of them. Pipelines with fewer stages at a slot are covered: stages may stay empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.plan.search.bound.micro_batch_bound import EXACT, Part, most_micro_batches
from isthmus.plan.search.bound.reduce_tail import Tail
from isthmus.plan.search.bound.wan_bound import Crossing, crossing_of
from isthmus.plan.search.chains.slot_orders import may_return
from isthmus.plan.search.chains.space import Space
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_costs import Seat, few
from isthmus.plan.time.collectives import all_reduce_s

AHEAD = {"1f1b": 1, "overlapped": 2}
"""Forwards that a stage may run ahead per stage after it, by schedule; for others unlimited."""

ANY = 0
"""Unlimited forwards ahead."""


@dataclass(frozen=True, slots=True)
class Chance:
    """`dp` replicas; for each slot its choices of (cost table, most stages that fit)."""

    dp: int
    choices: tuple[tuple[tuple[Seat, int], ...], ...]
    # Lower bound on replicas with every stage in one cluster; 1 for a pooled slot.
    reducing: int

    @property
    def decided(self) -> bool:
        """Whether every slot has one choice."""
        return all(len(one) == 1 for one in self.choices)

    def decide(self) -> Iterator[Chance]:
        """Yield the relaxation with every combination of choices."""
        for chosen in itertools.product(*self.choices):
            yield Chance(self.dp, tuple((one,) for one in chosen), self.reducing)


class Chances:
    """The relaxations for one micro-batch size and `total` micro-batches on any of `spots`."""

    def __init__(self, space: Space, spots: Sequence[Spot], size: int, total: int) -> None:
        self.space, self.size, self.total = space, size, total
        self.layers = space.task.profile.num_layers
        self.gradient_bytes = 4 * (0.75 if space.limits.zero else 1.0)
        self.least_parameters = min(layer.parameters for layer in space.task.kinds)
        self._tables: dict[tuple[int, int], list[tuple[float, ...]]] = {}
        self._known: dict[tuple[int, ...], list[Chance]] = {}
        self._least: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._reduced: dict[tuple[int, int], float] = {}
        self._crossings: dict[tuple[str, ...], Crossing] = {}
        self._rooms = {slot: self._room(slot) for slot in spots}
        cost_tables = [cost_table for room in self._rooms.values() for cost_table, _ in room]
        self.rest_s = min((cost_table.rest_s for cost_table in cost_tables), default=0.0)
        self._first = cost_tables[0] if cost_tables else None
        self._message_bytes = cost_tables[0].message_bytes if cost_tables else 0.0

    def free_s(self, spots: Sequence[Spot]) -> float:
        """Return the seconds of all chips at their best rate, without any waiting."""
        rate = 0.0
        for slot in spots:
            rate += max(
                (room / self.layer_s(cost_table) for cost_table, room in self._rooms_of(slot)), default=0.0
            )
        return self.rest_s + self.total * self.layers / rate if rate else math.inf

    # --- enumeration ---

    def of(self, spots: tuple[Spot, ...]) -> list[Chance]:
        """Return the relaxations of a replica group."""
        key = tuple(map(id, spots))
        if key not in self._known:
            self._known[key] = list(self._alone(spots[0]) if len(spots) == 1 else self._together(spots))
        return self._known[key]

    def ahead(self, several: bool) -> int:
        """Return the forwards a stage may run ahead per stage after it; `several`: over several clusters."""
        limits = self.space.limits
        if limits.schedule:
            usual = limits.schedule
        else:
            usual = "overlapped" if several and limits.overlap and not limits.executable else "1f1b"
        if limits.executable and usual == "overlapped":
            return ANY  # it fills the available memory
        return AHEAD.get(usual, ANY)

    def returns(self, spots: Sequence[Spot]) -> bool:
        """Return whether a pipeline over these slots may end at the slot where it began."""
        return may_return(spots) and not self.space.limits.executable

    def _alone(self, spot: Spot) -> Iterator[Chance]:
        """Yield every relaxation of one slot."""
        if not spot.reads_data:
            return
        for cost_table, room in self._rooms_of(spot):
            for stages in range(1, min(room, self.layers) + 1):
                for dp in self.space.numbers.replicas(room // stages, self.total):
                    yield Chance(dp, (((cost_table, stages),),), 1 if spot.members else dp)

    def _together(self, spots: tuple[Spot, ...]) -> Iterator[Chance]:
        """Yield the relaxations of several slots by number of replicas, with degrees left open."""
        if sum(slot.reads_data for slot in spots) < (1 if self.returns(spots) else 2):
            return
        capacities, numbers = [self._rooms_of(slot) for slot in spots], set[int]()
        for _, room in itertools.chain(*capacities):
            for stages in range(1, min(room, self.layers) + 1):
                numbers.update(self.space.numbers.replicas(room // stages, self.total))
        for dp in sorted(numbers):
            choices = tuple(
                tuple((cost_table, min(room // dp, self.layers)) for cost_table, room in one if room >= dp)
                for one in capacities
            )
            if all(choices):
                yield Chance(dp, choices, 1 if any(slot.members for slot in spots) else dp)

    def _rooms_of(self, spot: Spot) -> list[tuple[Seat, int]]:
        if spot not in self._rooms:
            self._rooms[spot] = self._room(spot)
        return self._rooms[spot]

    def _room(self, spot: Spot) -> list[tuple[Seat, int]]:
        """Return each cost table of a slot with the number of stages that fit."""
        most, found = self.space.limits.max_chips, []
        for cut in self.space.cuts(spot):
            cost_table = self.space.seat(spot, cut, self.size)
            room = spot.places(cost_table.num_chips)
            found.append((cost_table, min(room, most // cost_table.num_chips) if most else room))
        return [one for one in found if one[1]]

    # --- bounds ---

    def free(self, chance: Chance, tail: Tail, time_s: float) -> int:
        """Return the most micro-batches of a replica whose stages never wait."""
        rate = 0.0
        for choices in chance.choices:
            rate += max(stages / self.layer_s(cost_table) for cost_table, stages in choices)
        most = (time_s - tail.fixed_s - self.rest_s) * rate / self.layers * (1 + 1e-9)
        return min(math.floor(most), -(-self.total // chance.dp)) if most >= 1 else 0

    def filled(
        self, chance: Chance, spots: tuple[Spot, ...], tail: Tail, time_s: float, at_most: int, several: bool
    ) -> int:
        """Return the most micro-batches of a replica, counting pipeline fill and drain and its messages."""
        left_s, crossing = time_s - tail.fixed_s - self.rest_s, self._crossing(spots)
        if crossing.wire_s:  # one micro-batch's passes precede the first message and follow the last
            passes_s = self.layers * min(
                self.layer_s(cost_table) for one in chance.choices for cost_table, _ in one
            )
            messages = (left_s - passes_s) / crossing.wire_s * EXACT
            at_most = min(at_most, 1 + math.floor((messages - 1) / chance.dp)) if messages >= 1 else 0
        parts = [
            [
                Part(
                    stages,
                    self.layer_s(cost_table),
                    self.reduce_s(cost_table, chance.reducing, tail) if self.space.task.equal_layers else 0.0,
                    cost_table.forward_share[1],
                )
                for cost_table, stages in one
            ]
            for one in chance.choices
        ]
        return most_micro_batches(
            parts, self.layers, left_s, at_most,
            ahead=self.ahead(several), whole=self.space.task.equal_layers, hops_s=crossing.hops_s,
        )  # fmt: skip

    def _crossing(self, spots: tuple[Spot, ...]) -> Crossing:
        """Return a lower bound on a pipeline's transfers between clusters; zero for pooled slots."""
        if any(slot.members for slot in spots):
            return Crossing()
        names = tuple(dict.fromkeys(slot.cluster for slot in spots))
        if names not in self._crossings:
            self._crossings[names] = crossing_of(names, self.space.ways, self._message_bytes)
        return self._crossings[names]

    def layer_s(self, seat: Seat) -> float:
        """Return the least seconds of a layer, both passes, weighted as on a reference chip."""
        return seat.layer_s(self._first or seat)

    def reduce_s(self, seat: Seat, dp: int, tail: Tail) -> float:
        """Return the least seconds to reduce a layer's gradients over `dp` or more replicas."""
        return self._element_s(seat, dp) * seat.least_parameters + tail.parameter_s * self.least_parameters

    def seconds(self, seat: Seat, ends: tuple[bool, bool], in_flight: int, dp: int) -> tuple[float, ...]:
        """Return a stage's seconds by number of layers, shape [most layers]; `ends`: (is first, is last).

        A later stage counts as first where all before it are empty, so with unequal layers it may hold the
        first layer. `dp` is rounded up to limit the number of tables: more replicas leave more memory.
        """
        dp = few(dp)
        zero = self.space.limits.zero if dp > 1 else 0
        if self.space.task.equal_layers:
            return seat.table(*ends, in_flight, dp, zero).seconds
        key = (id(seat), ends, in_flight, dp)
        if key not in self._least:
            places = {ends, (True, ends[1])}
            each = [seat.ranges(*place, in_flight, dp, zero).least.seconds for place in places]
            self._least[key] = tuple(map(min, itertools.zip_longest(*each, fillvalue=math.inf)))
        return self._least[key]

    def tables(self, seat: Seat, dp: int, count: int) -> list[tuple[float, ...]]:
        """Return a middle stage's seconds by number of layers, for 1 to `count` micro-batches in flight."""
        found = self._tables.setdefault((id(seat), dp), [])
        while len(found) < count:
            found.append(self.seconds(seat, (False, False), len(found) + 1, dp))
        return found

    def end_s(self, seat: Seat, dp: int, tail: Tail, *, is_first: bool) -> float:
        """Return the least seconds to reduce what the first or last stage holds beside its layers."""
        parameters = seat.end_parameters(is_first)
        return self._element_s(seat, dp) * parameters + tail.parameter_s * parameters

    def _element_s(self, seat: Seat, dp: int) -> float:
        """Return the seconds to reduce one parameter's gradient over `dp` or more replicas."""
        key = (id(seat), dp)
        if dp < 2:
            return 0.0
        if key not in self._reduced:
            each = self.gradient_bytes * (dp - 1) / dp
            self._reduced[key] = each * all_reduce_s(seat.host.topology, 1e12, dp, seat.num_chips) / 1e12
        return self._reduced[key]
