"""`prove_bound`: a proven lower bound on the iteration time of every plan in the complete search space.

Bisects over a target time. A target is refuted if every partition of every set of slots into replica groups
falls short of the batch, with one micro-batch size for all groups or a size per group. A group is credited
with the samples of its best relaxation: replicas x micro-batches x size. This is first bounded in closed form
(`most_micro_batches`), then checked stage by stage (`may_end`), best relaxation first, and only where the
partition would otherwise reach the batch. All stage and replica counts, degrees and orders are covered.
`docs/design/planner.md` shows why each step errs on the safe side.
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
"""Up to this many slots every partition is checked; for more, the bound is all chips at their best rate."""

MET = 1e-3
"""Relative gap at which the bound counts as meeting the best plan."""

CLOSE = 0.01
"""Relative gap at which the bisection stops."""

STEP = 0.03
"""Relative distance of the first target below the best plan; tripled while targets are not refuted."""

FILLING = 4
"""Effort charged for one closed-form pipeline bound, in stages."""

ATTEMPTS = 6
"""Upper limit on targets tried."""


@dataclass(slots=True)
class Option:
    """A relaxation of a replica group for one micro-batch size, with bounds on a replica's micro-batches."""

    chances: Chances
    chance: Chance
    # Micro-batches that are not refuted yet.
    most: int
    # Micro-batches that the stage check could not refute.
    stands: int = 0
    # Whether `most` includes the closed-form pipeline bound.
    filled: bool = False

    @property
    def step(self) -> int:
        """Samples of one micro-batch on all replicas."""
        return self.chance.dp * self.chances.size

    @property
    def value(self) -> int:
        """Upper bound on the samples of all replicas."""
        return self.step * self.most


@dataclass
class Island:
    """The relaxations of one replica group in a heap of (-value, serial number, option)."""

    spots: tuple[Spot, ...]
    tail: Tail
    # Whether it is the only replica group.
    alone: bool
    # Whether several clusters take part.
    several: bool
    heap: list[tuple[int, int, Option]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def value(self) -> int:
        """Upper bound on the group's samples."""
        return -self.heap[0][0] if self.heap else 0

    def item(self, option: Option) -> tuple[int, int, Option]:
        """Return the heap entry of an option."""
        return -option.value, next(self.numbers), option


def prove_bound(
    space: Space, spots: Sequence[Spot], samples: int, asked_size: int, best_s: float, effort: int
) -> float:
    """Return a lower bound in seconds on every plan on these slots; `best_s` is the best known plan.

    Checks about `effort` stages at most. With `effort` 0 the bound assumes chips that never wait.
    """
    sizes = [
        Chances(space, spots, size, samples // size) for size in space.micro_batch_sizes(asked_size, samples)
    ]
    # Step 1: start from chips that never wait.
    cases = _cases(space, sizes)
    low_s = min((_free_s(some, spots, samples) for some, _ in cases), default=math.inf)
    if len(spots) > MOST_SPOTS or not best_s < math.inf or not effort:
        return min(low_s, best_s)
    # Step 2: try targets between that and the best plan; refute each case, weakest bound first.
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
                effort //= 3  # the gap will stay large
    return low_s


def _cases(space: Space, sizes: Sequence[Chances]) -> list[tuple[Sequence[Chances], range]]:
    """Return what to refute: micro-batch sizes that may be mixed, and the numbers of groups."""
    any_number = range(1, MOST_SPOTS + 1)
    if space.limits.even_batches or len(sizes) < 2:
        return [([one], any_number) for one in sizes]
    return [*(([one], range(1, 2)) for one in sizes), (sizes, range(2, MOST_SPOTS + 1))]


def _free_s(sizes: Sequence[Chances], spots: Sequence[Spot], samples: int) -> float:
    """Return the seconds of all chips at their best rate over `sizes`, without any waiting."""
    rest_s = min(one.rest_s for one in sizes)
    rate = sum(max(samples / (one.free_s([slot]) - one.rest_s) for one in sizes) for slot in spots)
    return rest_s + samples / rate if rate else math.inf


class Refutation:
    """An attempt to refute a target time for some micro-batch sizes, within about `effort` checked stages."""

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
        self._pooled = list(pooled_lists(self.spots))  # `_islands` is keyed by slot ids
        self._islands: dict[tuple[object, ...], Island] = {}

    def holds(self) -> bool:
        """Return whether no partition of any set of slots reaches the batch within the time."""
        limits = self.sizes[0].space.limits
        for chosen in self._sets():
            if not limits.mixed_chips and len({slot.group.chip for slot in chosen}) > 1:
                continue
            partitions = all_partitions(len(chosen))
            for partition in sorted(partitions, key=len, reverse=True):  # cheap partitions first
                if len(partition) not in self.numbers:
                    continue
                if self._reached([tuple(chosen[place] for place in one) for one in partition]):
                    return False
        return True

    def _sets(self) -> Iterator[tuple[Spot, ...]]:
        """Yield the sets of slots, large ones first, then those with some slots pooled."""
        for count in range(len(self.spots), 0, -1):
            yield from itertools.combinations(self.spots, count)
        if may_pool(self.sizes[0].space):
            for pool, *others in self._pooled:
                for count in range(len(others), -1, -1):
                    for chosen in itertools.combinations(others, count):
                        yield (pool, *chosen)

    def _reached(self, parts: Sequence[tuple[Spot, ...]]) -> bool:
        """Return whether replica groups may reach the batch; checks their best options as far as needed."""
        relaxations, alone = self.sizes[0], len(parts) == 1
        tail = NO_TAIL
        if not alone and relaxations.space.task.local_steps == 1:
            tail = tail_of(parts, relaxations.space.ways, relaxations.gradient_bytes)
        several = len({slot.cluster for part in parts for slot in flat(part)}) > 1
        relaxed = [self._island(part, tail, alone, several) for part in parts]
        while sum(one.value for one in relaxed) >= self.samples:
            moved = False
            for one in relaxed:
                needed = self.samples - sum(other.value for other in relaxed) + one.value
                moved = self._lower(one, needed) or moved
            if not moved:
                return True
        return False

    def _island(self, spots: tuple[Spot, ...], tail: Tail, alone: bool, several: bool) -> Island:
        key = (*map(id, spots), tail, alone, several)
        if key not in self._islands:
            replica_group = self._islands[key] = Island(spots, tail, alone, several)
            for relaxations in self.sizes:
                for relaxation in relaxations.of(spots):
                    option = Option(relaxations, relaxation, relaxations.free(relaxation, tail, self.time_s))
                    if option.most > 0:
                        replica_group.heap.append(replica_group.item(option))
            self.effort -= len(replica_group.heap)
            heapify(replica_group.heap)
        return self._islands[key]

    def _lower(self, island: Island, needed: int) -> bool:
        """Check the best option until the group's bound falls below `needed` or its best option stands."""
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
        """Replace the best option by one per combination of degrees."""
        heappop(island.heap)
        for relaxation in option.chance.decide():
            most = min(option.most, option.chances.free(relaxation, island.tail, self.time_s))
            self.effort -= 1
            if most > 0:
                heappush(island.heap, island.item(Option(option.chances, relaxation, most)))

    def _look(self, island: Island, option: Option, needed: int) -> None:
        """Check stage by stage whether a replica may finish `needed` micro-batches, then more."""
        asked = needed if option.stands < needed else (option.stands + option.most + 1) // 2
        relaxations, in_step = option.chances, 1
        if island.alone:  # these replicas take one micro-batch more
            in_step = max(1, relaxations.total - option.chance.dp * (asked - 1))
        look = Look(asked, self.time_s, in_step, relaxations.ahead(island.several))
        found, spent = may_end(relaxations, option.chance, island.spots, island.tail, look)
        self.effort -= spent
        if found:
            option.stands = asked
        else:
            self._settle(island, option, asked - 1)
