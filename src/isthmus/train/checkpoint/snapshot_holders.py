"""`choose_snapshot_holders`: choose for each rank the peer that holds a copy of its snapshot."""

from __future__ import annotations

from collections.abc import Sequence


def choose_snapshot_holders(locations: Sequence[tuple[str, str]], *, across_clusters: bool) -> tuple[int | None, ...]:
    """Return the holder of each rank, by rank; None if no rank is eligible.

    `locations` are the (cluster, machine) of each rank. A holder is on another machine of the same cluster; with
    `across_clusters`, on another cluster if its own has a single machine. Among the eligible ranks the one
    with the fewest copies so far is chosen; ties go to the next higher rank, cyclically.
    """
    size = len(locations)
    load = [0] * size
    holders: list[int | None] = []
    for rank, (cluster, machine) in enumerate(locations):
        others = [one for one in range(size) if locations[one] != (cluster, machine)]
        near = [one for one in others if locations[one][0] == cluster]
        allowed = near or (others if across_clusters else [])
        holder = min(allowed, key=lambda one: (load[one], (one - rank) % size), default=None)
        if holder is not None:
            load[holder] += 1
        holders.append(holder)
    return tuple(holders)
