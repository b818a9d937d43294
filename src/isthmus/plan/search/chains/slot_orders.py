"""`orders`: orders in which a pipeline may visit the slots of a replica group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from isthmus.plan.search.costs.routes import Ways
from isthmus.plan.search.costs.slots import Spot, flat

MAX_ORDERED = 3
"""Replica groups of up to this many slots are tried in every order."""

MAX_POOLED = 3
"""Pools of up to this many slots are filled in every order; larger ones from either end."""


def orders(island: Sequence[Spot], ways: Ways) -> list[tuple[Spot, ...]]:
    """Return the orders that visit each slot once, and each cluster without interruption.

    First and last slot may read the data, and neighbours are linked. For many slots only the paths that
    always take the fastest link are returned.
    """
    if len(island) > MAX_ORDERED:
        candidates = _near_orders(island, ways)
    else:
        candidates = itertools.chain.from_iterable(map(_fillings, itertools.permutations(island)))
    return [one for one in candidates if one[0].reads_data and one[-1].reads_data and _joined(one, ways)]


def returns(island: Sequence[Spot], ways: Ways) -> list[tuple[Spot, ...]]:
    """Return the orders from which a pipeline may return to its first slot."""
    if not may_return(island):
        return []
    return [
        one
        for one in itertools.permutations(island)
        if one[0].reads_data and _joined(one, ways) and not ways.missing(one[-1].cluster, one[0].cluster)
    ]


def may_return(island: Sequence[Spot]) -> bool:
    """Return whether a pipeline may return to the slot where it began."""
    return 1 < len(island) <= MAX_ORDERED and not any(slot.members for slot in island)


def _joined(order: Sequence[Spot], ways: Ways) -> bool:
    """Return whether consecutive clusters are linked and no cluster is visited twice."""
    clusters = [name for name, _ in itertools.groupby(slot.cluster for slot in flat(order))]
    if len(clusters) > len(set(clusters)):
        return False
    return not any(ways.missing(a, b) for a, b in itertools.pairwise(clusters))


def _fillings(order: Sequence[Spot]) -> Iterator[tuple[Spot, ...]]:
    """Yield an order with its pools filled in every order."""
    return itertools.product(*map(_filled, order))


def _filled(spot: Spot) -> list[Spot]:
    if not spot.members:
        return [spot]
    few = len(spot.members) <= MAX_POOLED
    each = itertools.permutations(spot.members) if few else (spot.members, spot.members[::-1])
    return [spot.filled(members) for members in each]


def _near_orders(island: Sequence[Spot], ways: Ways) -> Iterator[tuple[Spot, ...]]:
    clusters = list(dict.fromkeys(slot.cluster for slot in island))
    inside = {
        name: sorted((s for s in island if s.cluster == name), key=lambda s: -s.chip.memory_bytes)
        for name in clusters
    }
    for chain in dict.fromkeys(_near_chain(clusters, start, ways) for start in clusters):
        yield tuple(slot for name in chain for slot in inside[name])


def _near_chain(clusters: Sequence[str], start: str, ways: Ways) -> tuple[str, ...]:
    """Return the path from `start` that always takes the fastest link."""
    chain, left = [start], [name for name in clusters if name != start]
    while left:
        left.sort(key=lambda name: -ways.rate(chain[-1], name))
        chain.append(left.pop(0))
    return tuple(chain)
