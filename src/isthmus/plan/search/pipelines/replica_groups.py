"""`replica_group_sets`: the sets of replica groups to try, each group hosting one pipeline over its slots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from isthmus.plan.search.costs.slots import ChipSlot, pool_slots, pooled_combinations
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.splits.partitions import Partition, all_partitions, nested_partitions

MAX_EXHAUSTIVE_SLOTS = 4
"""Up to this many slots, all their subsets and partitions are tried; for more, nested clusterings."""

MAX_SLOTS_IN_PIPELINE = 3
"""Of many slots, each set of up to this many is also tried as one pipeline."""

MAX_POOLED_CHIPS = 1024
"""Slots with more chips are neither pooled nor, beside many slots, tried as one pipeline."""

DENSE_SIZES, SIZE_STEP = 12, 1.25
"""Where only some slots are combined: up to this many of the fastest, each number is tried; beyond, in these steps."""

NEAR_SIZE_STEP = 2.0
"""The same for slots linked each to each if most of them are part of a larger such set, for all numbers."""

ReplicaGroup = tuple[ChipSlot, ...]
"""The slots of one replica group."""


def replica_group_sets(
    slots: Sequence[ChipSlot], space: SearchSpace, in_pipelines: Sequence[ChipSlot] | None = None
) -> Iterator[tuple[ReplicaGroup, ...]]:
    """Yield the sets of replica groups to try, with equal slots pooled, too, where stages may be replicated.

    Every partition of every subset for few slots; nested clusterings by link speed for many, and small subsets of
    `in_pipelines` (None: of all) as one pipeline.
    """
    if len(slots) <= MAX_EXHAUSTIVE_SLOTS:
        for size in range(1, len(slots) + 1):
            for chosen in itertools.combinations(slots, size):
                yield from _all_groupings(chosen)
        if may_pool(space):
            yield from _pooled_sets(slots, space)
        return
    space.thinned = True
    yield from dict.fromkeys(_thinned_sets(slots, space, in_pipelines))
    if may_pool(space):
        yield from _large_pooled_sets(slots)


def _pooled_sets(slots: Sequence[ChipSlot], space: SearchSpace) -> Iterator[tuple[ReplicaGroup, ...]]:
    """Yield the sets of few slots with some pooled."""
    for pool, *others in pooled_combinations(slots):
        if pool.chips > MAX_POOLED_CHIPS:
            space.thinned = True
            continue
        for size in range(len(others) + 1):
            for chosen in itertools.combinations(others, size):
                yield from _all_groupings((pool, *chosen))


def _thinned_sets(
    slots: Sequence[ChipSlot], space: SearchSpace, in_pipelines: Sequence[ChipSlot] | None
) -> Iterator[tuple[ReplicaGroup, ...]]:
    """Yield the sets for many slots: nested clusterings, and small subsets as one pipeline."""
    rates = {(a, b): _link_rate(space, a, b) for a, b in itertools.combinations(slots, 2)}
    for chosen in _candidate_slot_sets(slots, space, in_pipelines is not None):
        for partition in nested_partitions(len(chosen), lambda i, j, some=chosen: rates[some[i], some[j]]):  # type: ignore[misc]
            yield _to_groups(chosen, partition)
    for size in range(2, MAX_SLOTS_IN_PIPELINE + 1):
        for chosen in itertools.combinations(slots if in_pipelines is None else in_pipelines, size):
            if sum(slot.chips for slot in chosen) <= MAX_POOLED_CHIPS:
                yield (chosen,)


def may_pool(space: SearchSpace) -> bool:
    """Return whether a stage may have replicas, and hence replicas at several slots."""
    return not space.limits.executable and space.limits.dp != 1


def _all_groupings(chosen: Sequence[ChipSlot]) -> Iterator[tuple[ReplicaGroup, ...]]:
    for partition in all_partitions(len(chosen)):
        yield _to_groups(chosen, partition)


def _large_pooled_sets(slots: Sequence[ChipSlot]) -> Iterator[tuple[ReplicaGroup, ...]]:
    """Yield pools of two slots of a kind, then of each whole kind, alone and with another kind."""
    kinds = {slot.kind: [one for one in slots if one.kind == slot.kind] for slot in slots}
    kinds = {kind: some for kind, some in kinds.items() if sum(slot.chips for slot in some) <= MAX_POOLED_CHIPS}
    for same_kind in kinds.values():
        if len(same_kind) > 2:
            yield from (((pool_slots(pair),),) for pair in itertools.combinations(same_kind, 2))
    whole = [pool_slots(same_kind) if len(same_kind) > 1 else same_kind[0] for same_kind in kinds.values()]
    for size in (1, 2):
        for chosen in itertools.combinations(whole, size):
            if any(slot.members for slot in chosen):
                yield from _all_groupings(chosen)


def _to_groups(chosen: Sequence[ChipSlot], partition: Partition) -> tuple[ReplicaGroup, ...]:
    return tuple(tuple(chosen[place] for place in replica_group) for replica_group in partition)


def _link_rate(space: SearchSpace, a: ChipSlot, b: ChipSlot) -> float:
    if a.cluster != b.cluster:
        return space.routes.bytes_per_s(a.cluster, b.cluster)
    return 1e15 if a.group.name == b.group.name else 1e12


def _candidate_slot_sets(slots: Sequence[ChipSlot], space: SearchSpace, some: bool) -> list[tuple[ChipSlot, ...]]:
    """Return sets of slots: all, the fastest ones, those of each cluster, single ones, the fastest linked ones.

    If these are only `some` of all slots, large sets and those that are mostly part of others are thinned.
    """
    dense = DENSE_SIZES if some else len(slots)
    speed = sorted(slots, key=lambda s: (-s.chips * s.chip.flop_per_s("bf16"), s.cluster, s.group.name))
    found = _prefixes(slots, speed, dense, SIZE_STEP)
    clusters = dict.fromkeys(slot.cluster for slot in slots)
    found += [tuple(slot for slot in slots if slot.cluster == name) for name in clusters]
    found += [(slot,) for slot in slots]
    linked_sets = list(dict.fromkeys(_linked_slots(seed, speed, space) for seed in speed))
    if some:
        linked_sets.sort(key=len, reverse=True)
    covered: set[ChipSlot] = set()
    for linked in linked_sets:
        if len(linked) < len(slots):
            near = some and 2 * len(linked & covered) > len(linked)
            grid = (0, NEAR_SIZE_STEP) if near else (dense, SIZE_STEP)
            found += _prefixes(slots, [slot for slot in speed if slot in linked], *grid)
            covered |= linked
    return list(dict.fromkeys(found))


def _prefixes(
    slots: Sequence[ChipSlot], speed: Sequence[ChipSlot], dense: int, step: float
) -> list[tuple[ChipSlot, ...]]:
    """Return the two or more fastest slots, most first, each set in the order of `slots`.

    Up to `dense` each number of them, beyond it numbers that differ by a ratio of about `step`.
    """
    found, count = [], len(speed)
    while count > 1:
        fastest = set(speed[:count])
        found.append(tuple(slot for slot in slots if slot in fastest))
        count = count - 1 if count <= dense else max(dense, math.floor(count / step))
    return found


def _linked_slots(seed: ChipSlot, speed: Sequence[ChipSlot], space: SearchSpace) -> frozenset[ChipSlot]:
    """Return the slots around a seed, the fastest first, that are linked each to each."""
    found = [seed]
    for slot in speed:
        if slot is not seed and not any(space.routes.missing_link(slot.cluster, one.cluster) for one in found):
            found.append(slot)
    return frozenset(found)
