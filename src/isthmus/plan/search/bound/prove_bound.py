"""`prove_bound`: a proven lower bound on the iteration time of every plan in the complete search space.

Bisects over a target time. A target is refuted if every partition of every set of slots into replica groups
falls short of the batch, with one micro-batch size for all groups or a size per group. A group is credited
with the samples of its best relaxation: replicas x micro-batches x size. This is first bounded in closed form
(`max_micro_batches`), then checked stage by stage (`can_finish`), best relaxation first, and only where the
partition would otherwise reach the batch. All stage and replica counts, degrees and orders are covered.
`docs/design/planner.md` shows why each step errs on the safe side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from isthmus.plan.search.bound.check_relaxation import FeasibilityQuery, can_finish
from isthmus.plan.search.bound.reduce_tail import NO_TAIL, ReduceTail, reduce_tail
from isthmus.plan.search.bound.relaxations import Relaxation, Relaxations, no_wait_s
from isthmus.plan.search.costs.slots import ChipSlot, flatten_pools, pooled_combinations
from isthmus.plan.search.pipelines.replica_groups import may_pool
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.splits.partitions import all_partitions

MAX_SLOTS = 4
"""Up to this many slots every partition is checked; for more, the bound is all chips at their best rate."""

OPTIMALITY_GAP = 1e-3
"""Relative gap at which the bound counts as meeting the best plan."""

BOUND_PRECISION = 0.01
"""Relative gap at which the bisection stops."""

FIRST_STEP = 0.03
"""Relative distance of the first target below the best plan; tripled while targets are not refuted."""

PIPELINE_BOUND_EFFORT = 4
"""Effort charged for one closed-form pipeline bound, in stages."""

MAX_ATTEMPTS = 6
"""Upper limit on targets tried."""


@dataclass(slots=True)
class RelaxationOption:
    """A relaxation of a replica group for one micro-batch size, with bounds on a replica's micro-batches."""

    relaxations: Relaxations
    relaxation: Relaxation
    # Micro-batches that are not refuted yet.
    max_micro_batches: int
    # Micro-batches that the stage check could not refute.
    feasible_micro_batches: int = 0
    # Whether `max_micro_batches` includes the closed-form pipeline bound.
    pipeline_bounded: bool = False

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples of one micro-batch on all replicas."""
        return self.relaxation.dp * self.relaxations.micro_batch_size

    @property
    def max_samples(self) -> int:
        """Upper bound on the samples of all replicas."""
        return self.samples_per_micro_batch * self.max_micro_batches


@dataclass
class GroupRelaxations:
    """The relaxations of one replica group in a heap of (-value, serial number, option)."""

    slots: tuple[ChipSlot, ...]
    tail: ReduceTail
    # Whether it is the only replica group.
    alone: bool
    # Whether several clusters take part.
    multi_cluster: bool
    heap: list[tuple[int, int, RelaxationOption]] = field(default_factory=list)
    serial_numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def max_samples(self) -> int:
        """Upper bound on the group's samples."""
        return -self.heap[0][0] if self.heap else 0

    def heap_entry(self, option: RelaxationOption) -> tuple[int, int, RelaxationOption]:
        """Return the heap entry of an option."""
        return -option.max_samples, next(self.serial_numbers), option


def prove_bound(
    space: SearchSpace,
    slots: Sequence[ChipSlot],
    samples: int,
    requested_size: int,
    best_s: float,
    effort: int,
) -> float:
    """Return a lower bound in seconds on every plan on these slots; `best_s` is the best known plan.

    Checks about `effort` stages at most. With `effort` 0 the bound assumes chips that never wait.
    """
    sizes = [
        Relaxations(space, slots, size, samples // size) for size in space.micro_batch_sizes(requested_size, samples)
    ]
    # Step 1: start from chips that never wait.
    cases = _refutation_cases(space, sizes)
    low_s = min((no_wait_s(some, slots, samples) for some, _ in cases), default=math.inf)
    if len(slots) > MAX_SLOTS or not best_s < math.inf or not effort:
        return min(low_s, best_s)
    # Step 2: try targets between that and the best plan; refute each case, weakest bound first.
    high_s, step_s = best_s, FIRST_STEP * best_s
    proven_s, whole = [low_s] * len(cases), effort
    for _ in range(MAX_ATTEMPTS):
        if high_s - low_s <= BOUND_PRECISION * best_s or effort <= 0:
            break
        time_s = max(best_s - step_s, (low_s + high_s) / 2)
        for number in sorted(range(len(cases)), key=proven_s.__getitem__):
            if proven_s[number] < time_s:
                share = min(whole // (2 if len(cases[number][0]) > 1 else 4), effort)
                one = Refutation(*cases[number], slots, samples, time_s, share)
                refuted = one.holds()
                effort -= share - one.effort
                if not refuted:
                    break
                proven_s[number] = time_s
        if min(proven_s) >= time_s:
            low_s, step_s = time_s, OPTIMALITY_GAP * best_s if high_s == best_s else step_s
        else:
            high_s, step_s = time_s, max(3 * step_s, FIRST_STEP * best_s)
            if time_s < (1 - 2 * FIRST_STEP) * best_s:
                effort //= 3  # the gap will stay large
    return low_s


def _refutation_cases(space: SearchSpace, sizes: Sequence[Relaxations]) -> list[tuple[Sequence[Relaxations], range]]:
    """Return what to refute: micro-batch sizes that may be mixed, and the numbers of groups."""
    any_number = range(1, MAX_SLOTS + 1)
    if space.limits.even_replicas or len(sizes) < 2:
        return [([one], any_number) for one in sizes]
    return [*(([one], range(1, 2)) for one in sizes), (sizes, range(2, MAX_SLOTS + 1))]


class Refutation:
    """An attempt to refute a target time for some micro-batch sizes, within about `effort` checked stages."""

    def __init__(
        self,
        sizes: Sequence[Relaxations],
        group_counts: range,
        slots: Sequence[ChipSlot],
        samples: int,
        time_s: float,
        effort: int,
    ) -> None:
        self.sizes, self.group_counts, self.slots, self.samples = sizes, group_counts, tuple(slots), samples
        self.time_s, self.effort = time_s, effort
        self._pooled_slots = list(pooled_combinations(self.slots))  # `_groups` is keyed by slot ids
        self._groups: dict[tuple[object, ...], GroupRelaxations] = {}

    def holds(self) -> bool:
        """Return whether no partition of any set of slots reaches the batch within the time."""
        limits = self.sizes[0].space.limits
        for chosen in self._slot_sets():
            if not limits.mixed_chips and len({slot.group.chip for slot in chosen}) > 1:
                continue
            partitions = all_partitions(len(chosen))
            for partition in sorted(partitions, key=len, reverse=True):  # cheap partitions first
                if len(partition) not in self.group_counts:
                    continue
                if self._reaches_batch([tuple(chosen[place] for place in one) for one in partition]):
                    return False
        return True

    def _slot_sets(self) -> Iterator[tuple[ChipSlot, ...]]:
        """Yield the sets of slots, large ones first, then those with some slots pooled."""
        for count in range(len(self.slots), 0, -1):
            yield from itertools.combinations(self.slots, count)
        if may_pool(self.sizes[0].space):
            for pool, *others in self._pooled_slots:
                for count in range(len(others), -1, -1):
                    for chosen in itertools.combinations(others, count):
                        yield (pool, *chosen)

    def _reaches_batch(self, replica_groups: Sequence[tuple[ChipSlot, ...]]) -> bool:
        """Return whether replica groups may reach the batch; checks their best options as far as needed."""
        relaxations, alone = self.sizes[0], len(replica_groups) == 1
        tail = NO_TAIL
        if not alone and relaxations.space.workload.local_steps == 1:
            tail = reduce_tail(replica_groups, relaxations.space.routes, relaxations.gradient_bytes)
        several = len({slot.cluster for part in replica_groups for slot in flatten_pools(part)}) > 1
        relaxed = [self._relaxations_of(part, tail, alone, several) for part in replica_groups]
        while sum(one.max_samples for one in relaxed) >= self.samples:
            moved = False
            for one in relaxed:
                needed = self.samples - sum(other.max_samples for other in relaxed) + one.max_samples
                moved = self._lower_below(one, needed) or moved
            if not moved:
                return True
        return False

    def _relaxations_of(
        self, slots: tuple[ChipSlot, ...], tail: ReduceTail, alone: bool, multi_cluster: bool
    ) -> GroupRelaxations:
        key = (*map(id, slots), tail, alone, multi_cluster)
        if key not in self._groups:
            replica_group = self._groups[key] = GroupRelaxations(slots, tail, alone, multi_cluster)
            for relaxations in self.sizes:
                for relaxation in relaxations.for_group(slots):
                    option = RelaxationOption(
                        relaxations,
                        relaxation,
                        relaxations.no_wait_micro_batches(relaxation, tail, self.time_s),
                    )
                    if option.max_micro_batches > 0:
                        replica_group.heap.append(replica_group.heap_entry(option))
            self.effort -= len(replica_group.heap)
            heapify(replica_group.heap)
        return self._groups[key]

    def _lower_below(self, group: GroupRelaxations, needed: int) -> bool:
        """Check the best option until the group's bound falls below `needed` or its best option stands."""
        moved = False
        while group.heap and group.max_samples >= needed and self.effort > 0:
            option = group.heap[0][2]
            if not option.pipeline_bounded:
                most = option.relaxations.pipelined_micro_batches(
                    option.relaxation,
                    group.slots,
                    group.tail,
                    self.time_s,
                    option.max_micro_batches,
                    group.multi_cluster,
                )
                self._update_best(group, option, most)
                option.pipeline_bounded = True
                self.effort -= PIPELINE_BOUND_EFFORT
            elif not option.relaxation.degrees_fixed:
                self._expand_best(group, option)
            elif option.feasible_micro_batches == option.max_micro_batches:
                break
            else:
                self._check_best(group, option, -(-needed // option.samples_per_micro_batch))
            moved = True
        return moved

    def _update_best(self, group: GroupRelaxations, option: RelaxationOption, max_micro_batches: int) -> None:
        option.max_micro_batches = max_micro_batches
        if max_micro_batches > 0:
            heapreplace(group.heap, group.heap_entry(option))
        else:
            heappop(group.heap)

    def _expand_best(self, group: GroupRelaxations, option: RelaxationOption) -> None:
        """Replace the best option by one per combination of degrees."""
        heappop(group.heap)
        for relaxation in option.relaxation.fix_degrees():
            most = min(
                option.max_micro_batches,
                option.relaxations.no_wait_micro_batches(relaxation, group.tail, self.time_s),
            )
            self.effort -= 1
            if most > 0:
                heappush(group.heap, group.heap_entry(RelaxationOption(option.relaxations, relaxation, most)))

    def _check_best(self, group: GroupRelaxations, option: RelaxationOption, needed: int) -> None:
        """Check stage by stage whether a replica may finish `needed` micro-batches, then more."""
        asked = (
            needed
            if option.feasible_micro_batches < needed
            else (option.feasible_micro_batches + option.max_micro_batches + 1) // 2
        )
        relaxations, in_step = option.relaxations, 1
        if group.alone:  # these replicas take one micro-batch more
            in_step = max(1, relaxations.num_micro_batches - option.relaxation.dp * (asked - 1))
        look = FeasibilityQuery(asked, self.time_s, in_step, relaxations.max_ahead(group.multi_cluster))
        found, spent = can_finish(relaxations, option.relaxation, group.slots, group.tail, look)
        self.effort -= spent
        if found:
            option.feasible_micro_batches = asked
        else:
            self._update_best(group, option, asked - 1)
