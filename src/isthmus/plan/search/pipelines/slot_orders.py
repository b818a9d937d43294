"""`slot_orders`: orders in which a pipeline may visit the slots of a replica group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.slots import ChipSlot, flatten_pools

MAX_PERMUTED_SLOTS = 3
"""Replica groups of up to this many slots are tried in every order."""

MAX_PERMUTED_POOL = 3
"""Pools of up to this many slots are filled in every order; larger ones from either end."""


def slot_orders(replica_group: Sequence[ChipSlot], routes: Routes) -> list[tuple[ChipSlot, ...]]:
    """Return the orders that visit each slot once, and each cluster without interruption.

    First and last slot may read the data, and neighbours are linked. For many slots only the paths that
    always take the fastest link are returned.
    """
    if len(replica_group) > MAX_PERMUTED_SLOTS:
        candidates = _fastest_link_orders(replica_group, routes)
    else:
        candidates = itertools.chain.from_iterable(map(_with_pool_orders, itertools.permutations(replica_group)))
    return [one for one in candidates if one[0].reads_data and one[-1].reads_data and _is_connected(one, routes)]


def returning_orders(replica_group: Sequence[ChipSlot], routes: Routes) -> list[tuple[ChipSlot, ...]]:
    """Return the orders from which a pipeline may return to its first slot."""
    if not may_return(replica_group):
        return []
    return [
        one
        for one in itertools.permutations(replica_group)
        if one[0].reads_data and _is_connected(one, routes) and not routes.missing_link(one[-1].cluster, one[0].cluster)
    ]


def may_return(replica_group: Sequence[ChipSlot]) -> bool:
    """Return whether a pipeline may return to the slot where it began."""
    return 1 < len(replica_group) <= MAX_PERMUTED_SLOTS and not any(slot.members for slot in replica_group)


def _is_connected(order: Sequence[ChipSlot], routes: Routes) -> bool:
    """Return whether consecutive clusters are linked and no cluster is visited twice."""
    clusters = [name for name, _ in itertools.groupby(slot.cluster for slot in flatten_pools(order))]
    if len(clusters) > len(set(clusters)):
        return False
    return not any(routes.missing_link(a, b) for a, b in itertools.pairwise(clusters))


def _with_pool_orders(order: Sequence[ChipSlot]) -> Iterator[tuple[ChipSlot, ...]]:
    """Yield an order with its pools filled in every order."""
    return itertools.product(*map(_fill_orders, order))


def _fill_orders(slot: ChipSlot) -> list[ChipSlot]:
    if not slot.members:
        return [slot]
    few = len(slot.members) <= MAX_PERMUTED_POOL
    each = itertools.permutations(slot.members) if few else (slot.members, slot.members[::-1])
    return [slot.with_fill_order(members) for members in each]


def _fastest_link_orders(replica_group: Sequence[ChipSlot], routes: Routes) -> Iterator[tuple[ChipSlot, ...]]:
    clusters = list(dict.fromkeys(slot.cluster for slot in replica_group))
    inside = {
        name: sorted((s for s in replica_group if s.cluster == name), key=lambda s: -s.chip.memory_bytes)
        for name in clusters
    }
    slowness = {name: {other: -routes.bytes_per_s(name, other) for other in clusters} for name in clusters}
    for chain in dict.fromkeys(_fastest_link_path(clusters, start, slowness) for start in clusters):
        yield tuple(slot for name in chain for slot in inside[name])


def _fastest_link_path(
    clusters: Sequence[str], start: str, slowness: Mapping[str, Mapping[str, float]]
) -> tuple[str, ...]:
    """Return the path from `start` that always takes the fastest link; `slowness` is its negative rate by ends."""
    chain, left = [start], [name for name in clusters if name != start]
    while left:
        left.sort(key=slowness[chain[-1]].__getitem__)
        chain.append(left.pop(0))
    return tuple(chain)
