"""`island_sets`: the sets of replica groups to try, each group hosting one pipeline over its slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from isthmus.plan.search.chains.space import Space
from isthmus.plan.search.costs.slots import Spot, pool_of, pooled_lists
from isthmus.plan.search.splits.partitions import Partition, all_partitions, nested_partitions

FEW_SPOTS = 4
"""Up to this many slots, all their subsets and partitions are tried; for more, nested clusterings."""

FEW_IN_CHAIN = 3
"""Of many slots, each set of up to this many is also tried as one pipeline."""

MODEST = 1024
"""Slots with more chips are neither pooled nor, beside many slots, tried as one pipeline."""

Island = tuple[Spot, ...]
"""The slots of one replica group."""


def island_sets(spots: Sequence[Spot], space: Space) -> Iterator[tuple[Island, ...]]:
    """Yield the sets of replica groups to try, with equal slots pooled, too, where stages may be replicated.

    Every partition of every subset for few slots; nested clusterings by link speed for many.
    """
    if len(spots) <= FEW_SPOTS:
        for size in range(1, len(spots) + 1):
            for chosen in itertools.combinations(spots, size):
                yield from _partitioned(chosen)
        if may_pool(space):
            yield from _pools(spots, space)
        return
    space.thinned = True
    yield from dict.fromkeys(_many(spots, space))
    if may_pool(space):
        yield from _large_pools(spots)


def _pools(spots: Sequence[Spot], space: Space) -> Iterator[tuple[Island, ...]]:
    """Yield the sets of few slots with some pooled."""
    for pool, *others in pooled_lists(spots):
        if pool.chips > MODEST:
            space.thinned = True
            continue
        for size in range(len(others) + 1):
            for chosen in itertools.combinations(others, size):
                yield from _partitioned((pool, *chosen))


def _many(spots: Sequence[Spot], space: Space) -> Iterator[tuple[Island, ...]]:
    """Yield the sets for many slots: nested clusterings, and small subsets as one pipeline."""
    for chosen in _large_sets(spots):
        rates = {(i, j): _rate(space, a, b) for i, a in enumerate(chosen) for j, b in enumerate(chosen)}
        for partition in nested_partitions(len(chosen), lambda i, j, rates=rates: rates[i, j]):  # type: ignore[misc]
            yield _islands(chosen, partition)
    for size in range(2, FEW_IN_CHAIN + 1):
        for chosen in itertools.combinations(spots, size):
            if sum(slot.chips for slot in chosen) <= MODEST:
                yield (chosen,)


def may_pool(space: Space) -> bool:
    """Return whether a stage may have replicas, and hence replicas at several slots."""
    return not space.limits.executable and space.limits.dp != 1


def _partitioned(chosen: Sequence[Spot]) -> Iterator[tuple[Island, ...]]:
    for partition in all_partitions(len(chosen)):
        yield _islands(chosen, partition)


def _large_pools(spots: Sequence[Spot]) -> Iterator[tuple[Island, ...]]:
    """Yield pools of two slots of a kind, then of each whole kind, alone and with another kind."""
    kinds = {slot.kind: [one for one in spots if one.kind == slot.kind] for slot in spots}
    kinds = {kind: some for kind, some in kinds.items() if sum(slot.chips for slot in some) <= MODEST}
    for same_kind in kinds.values():
        if len(same_kind) > 2:
            yield from (((pool_of(pair),),) for pair in itertools.combinations(same_kind, 2))
    whole = [pool_of(same_kind) if len(same_kind) > 1 else same_kind[0] for same_kind in kinds.values()]
    for size in (1, 2):
        for chosen in itertools.combinations(whole, size):
            if any(slot.members for slot in chosen):
                yield from _partitioned(chosen)


def _islands(chosen: Sequence[Spot], partition: Partition) -> tuple[Island, ...]:
    return tuple(tuple(chosen[place] for place in replica_group) for replica_group in partition)


def _rate(space: Space, a: Spot, b: Spot) -> float:
    if a.cluster != b.cluster:
        return space.ways.rate(a.cluster, b.cluster)
    return 1e15 if a.group.name == b.group.name else 1e12


def _large_sets(spots: Sequence[Spot]) -> list[tuple[Spot, ...]]:
    """Return sets of slots: all, the fastest ones, those of each cluster, single ones."""
    speed = sorted(spots, key=lambda s: (-s.chips * s.chip.flop_per_s("bf16"), s.cluster, s.group.name))
    prefixes = [tuple(s for s in spots if s in speed[:count]) for count in range(len(spots), 1, -1)]
    clusters = dict.fromkeys(slot.cluster for slot in spots)
    each = [tuple(slot for slot in spots if slot.cluster == name) for name in clusters]
    return list(dict.fromkeys([*prefixes, *each, *((slot,) for slot in spots)]))
