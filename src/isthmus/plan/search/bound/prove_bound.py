"""`prove_bound`: a time within which, provably, no plan of the whole space ends an iteration.

Branch and bound from below: a time short of the best plan is refuted or not; then a longer or a shorter one.
To refute it, every way to part every set of spots into islands must fall short of the batch: one island under
each micro-batch size, several with a size of its own for each. An island promises the samples of its best
chain, replicas x micro-batches x size. What its options promise is first
computed (`most_micro_batches`), then looked at stage by stage (`may_end`), the most promising first, and
only where its partition would otherwise reach the batch. Numbers of stages and replicas, cuts and orders are
all there, thinned nowhere. `docs/design/planner.md` says why each step errs on the safe side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from isthmus.plan.search.bound.check_relaxation import Look, may_end
from isthmus.plan.search.bound.reduce_tail import NO_TAIL, Tail, tail_of
from isthmus.plan.search.bound.relaxations import Chance, Chances
from isthmus.plan.search.chains.replica_groups import may_pool
from isthmus.plan.search.chains.space import Space
from isthmus.plan.search.costs.slots import Spot, flat, pooled_lists
from isthmus.plan.search.splits.partitions import all_partitions

MOST_SPOTS = 4
"""Of at most so many spots every partition is looked at; of more, all chips at the pace of their best cut."""

MET = 1e-3
"""A bound that comes so close to the best plan (relative) meets it."""

CLOSE = 0.01
"""A bound that comes so close is not made closer."""

STEP = 0.03
"""The first time that is tried is so much shorter than the best plan's; if it stands, the next thrice."""

FILLING = 4
"""Stages that could be looked at while the filling of a pipeline is weighed."""

ATTEMPTS = 6
"""Times that are tried at most."""


@dataclass(slots=True)
class Option:
    """A chance of an island under one size, and the micro-batches of a replica that were not refuted yet.

    Up to `stands` were looked at in vain. `filled` says that the filling of the pipeline was weighed.
    """

    chances: Chances
    chance: Chance
    most: int
    stands: int = 0
    filled: bool = False

    @property
    def step(self) -> int:
        """Samples of one micro-batch of all replicas."""
        return self.chance.dp * self.chances.size

    @property
    def value(self) -> int:
        """Samples of all replicas."""
        return self.step * self.most


@dataclass
class Island:
    """Options of one island by what they promise, in a heap of (-value, number, option).

    `alone` and `several`: whether other islands, and other clusters, take part.
    """

    spots: tuple[Spot, ...]
    tail: Tail
    alone: bool
    several: bool
    heap: list[tuple[int, int, Option]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def value(self) -> int:
        """Samples that the best option promises."""
        return -self.heap[0][0] if self.heap else 0

    def item(self, option: Option) -> tuple[int, int, Option]:
        """Return an option as it stands in the heap."""
        return -option.value, next(self.numbers), option


def prove_bound(
    space: Space, spots: Sequence[Spot], samples: int, asked_size: int, best_s: float, effort: int
) -> float:
    """Return seconds below every plan on these spots; `best_s` is what the best known plan takes.

    About `effort` stages are looked at, at most. Without any, chips that never wait are the bound.
    """
    sizes = [
        Chances(space, spots, size, samples // size) for size in space.micro_batch_sizes(asked_size, samples)
    ]
    cases = _cases(space, sizes)
    low_s = min((_free_s(some, spots, samples) for some, _ in cases), default=math.inf)
    if len(spots) > MOST_SPOTS or not best_s < math.inf or not effort:
        return min(low_s, best_s)
    high_s, step_s = best_s, STEP * best_s
    proven_s, whole = [low_s] * len(cases), effort
    for _ in range(ATTEMPTS):
        if high_s - low_s <= CLOSE * best_s or effort <= 0:
            break
        time_s = max(best_s - step_s, (low_s + high_s) / 2)
        for number in sorted(range(len(cases)), key=proven_s.__getitem__):
            if proven_s[number] < time_s:
                share = min(whole // (2 if len(cases[number][0]) > 1 else 4), effort)
                one = Refutation(*cases[number], spots, samples, time_s, share)
                refuted = one.holds()
                effort -= share - one.effort
                if not refuted:
                    break
                proven_s[number] = time_s
        if min(proven_s) >= time_s:
            low_s, step_s = time_s, MET * best_s if high_s == best_s else step_s
        else:
            high_s, step_s = time_s, max(3 * step_s, STEP * best_s)
            if time_s < (1 - 2 * STEP) * best_s:
                effort //= 3  # it will not be close
    return low_s


def _cases(space: Space, sizes: Sequence[Chances]) -> list[tuple[Sequence[Chances], range]]:
    """Return what must be refuted: sizes that may stand beside each other, and how many islands may."""
    any_number = range(1, MOST_SPOTS + 1)
    if space.limits.even_batches or len(sizes) < 2:
        return [([one], any_number) for one in sizes]
    return [*(([one], range(1, 2)) for one in sizes), (sizes, range(2, MOST_SPOTS + 1))]


def _free_s(sizes: Sequence[Chances], spots: Sequence[Spot], samples: int) -> float:
    """Return what all chips need at the pace of their best cut under any of the sizes, if none ever waits."""
    rest_s = min(one.rest_s for one in sizes)
    rate = sum(max(samples / (one.free_s([spot]) - one.rest_s) for one in sizes) for spot in spots)
    return rest_s + samples / rate if rate else math.inf


class Refutation:
    """The attempt to refute a time under some micro-batch sizes; at most about `effort` stages are seen."""

    def __init__(
        self,
        sizes: Sequence[Chances],
        numbers: range,
        spots: Sequence[Spot],
        samples: int,
        time_s: float,
        effort: int,
    ) -> None:
        self.sizes, self.numbers, self.spots, self.samples = sizes, numbers, tuple(spots), samples
        self.time_s, self.effort = time_s, effort
        self._pooled = list(pooled_lists(self.spots))  # islands are known by their spots
        self._islands: dict[tuple[object, ...], Island] = {}

    def holds(self) -> bool:
        """Say whether no partition of any set of spots reaches the batch within the time."""
        limits = self.sizes[0].space.limits
        for chosen in self._sets():
            if not limits.mixed_chips and len({spot.group.chip for spot in chosen}) > 1:
                continue
            partitions = all_partitions(len(chosen))
            for partition in sorted(partitions, key=len, reverse=True):  # cheap ones first
                if len(partition) not in self.numbers:
                    continue
                if self._reached([tuple(chosen[place] for place in one) for one in partition]):
                    return False
        return True

    def _sets(self) -> Iterator[tuple[Spot, ...]]:
        """Yield the sets of spots, large ones first, then those with some of one kind pooled."""
        for count in range(len(self.spots), 0, -1):
            yield from itertools.combinations(self.spots, count)
        if may_pool(self.sizes[0].space):
            for pool, *others in self._pooled:
                for count in range(len(others), -1, -1):
                    for chosen in itertools.combinations(others, count):
                        yield (pool, *chosen)

    def _reached(self, parts: Sequence[tuple[Spot, ...]]) -> bool:
        """Say whether islands may reach the batch, after looking at their best options as far as needed."""
        chances, alone = self.sizes[0], len(parts) == 1
        tail = NO_TAIL
        if not alone and chances.space.task.local_steps == 1:
            tail = tail_of(parts, chances.space.ways, chances.gradient_bytes)
        several = len({spot.cluster for part in parts for spot in flat(part)}) > 1
        islands = [self._island(part, tail, alone, several) for part in parts]
        while sum(one.value for one in islands) >= self.samples:
            moved = False
            for one in islands:
                needed = self.samples - sum(other.value for other in islands) + one.value
                moved = self._lower(one, needed) or moved
            if not moved:
                return True
        return False

    def _island(self, spots: tuple[Spot, ...], tail: Tail, alone: bool, several: bool) -> Island:
        key = (*map(id, spots), tail, alone, several)
        if key not in self._islands:
            island = self._islands[key] = Island(spots, tail, alone, several)
            for chances in self.sizes:
                for chance in chances.of(spots):
                    option = Option(chances, chance, chances.free(chance, tail, self.time_s))
                    if option.most > 0:
                        island.heap.append(island.item(option))
            self.effort -= len(island.heap)
            heapify(island.heap)
        return self._islands[key]

    def _lower(self, island: Island, needed: int) -> bool:
        """Look at the best option until the island promises less than `needed`, or its best one stands."""
        moved = False
        while island.heap and island.value >= needed and self.effort > 0:
            option = island.heap[0][2]
            if not option.filled:
                most = option.chances.filled(
                    option.chance, island.spots, island.tail, self.time_s, option.most, island.several
                )
                self._settle(island, option, most)
                option.filled = True
                self.effort -= FILLING
            elif not option.chance.decided:
                self._expand(island, option)
            elif option.stands == option.most:
                break
            else:
                self._look(island, option, -(-needed // option.step))
            moved = True
        return moved

    def _settle(self, island: Island, option: Option, most: int) -> None:
        option.most = most
        if most > 0:
            heapreplace(island.heap, island.item(option))
        else:
            heappop(island.heap)

    def _expand(self, island: Island, option: Option) -> None:
        """Put the chains with every combination of cuts in the place of the one that stood for them."""
        heappop(island.heap)
        for chance in option.chance.decide():
            most = min(option.most, option.chances.free(chance, island.tail, self.time_s))
            self.effort -= 1
            if most > 0:
                heappush(island.heap, island.item(Option(option.chances, chance, most)))

    def _look(self, island: Island, option: Option, needed: int) -> None:
        """Look stage by stage whether a replica may end what is needed; if so, how many it may end."""
        asked = needed if option.stands < needed else (option.stands + option.most + 1) // 2
        chances, in_step = option.chances, 1
        if island.alone:  # these replicas take one micro-batch more than the others
            in_step = max(1, chances.total - option.chance.dp * (asked - 1))
        look = Look(asked, self.time_s, in_step, chances.ahead(island.several))
        found, spent = may_end(chances, option.chance, island.spots, island.tail, look)
        self.effort -= spent
        if found:
            option.stands = asked
        else:
            self._settle(island, option, asked - 1)
