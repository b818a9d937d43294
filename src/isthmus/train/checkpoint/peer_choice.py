"""`choose_holders`: which rank holds a copy of each rank's memory, on a machine of its own."""

from __future__ import annotations

from collections.abc import Sequence


def choose_holders(places: Sequence[tuple[str, str]], *, across_clusters: bool) -> tuple[int | None, ...]:
    """Return the holder of each rank, by rank; None where there is none.

    `places` are cluster and machine of each rank. A holder is on another machine of the same cluster; with
    `across_clusters` of another cluster where the own one has no other machine. Each rank takes, of those
    that may, one that holds the fewest so far, the next behind it first.
    """
    size = len(places)
    load = [0] * size
    holders: list[int | None] = []
    for rank, (cluster, machine) in enumerate(places):
        others = [one for one in range(size) if places[one] != (cluster, machine)]
        near = [one for one in others if places[one][0] == cluster]
        allowed = near or (others if across_clusters else [])
        holder = min(allowed, key=lambda one: (load[one], (one - rank) % size), default=None)
        if holder is not None:
            load[holder] += 1
        holders.append(holder)
    return tuple(holders)
