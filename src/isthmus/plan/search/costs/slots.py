"""`Spot`: a node group with its free chips, as the planner sees it; `spots_of` applies the placement.

Spots of one kind may be **pooled**: their places are then filled one after the other, as though they were one
spot, so that a stage may have replicas in several clusters. `pooled_lists` says which are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from isthmus.core.chip import Chip
from isthmus.core.job import Placement
from isthmus.core.pool import Cluster, NodeGroup, Pool

FreeChips = Mapping[str, Mapping[str, int]]
"""Free chips by cluster and node group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spot:
    """`chips` free chips of one node group. `reads_data`: its stages may be first or last of a replica.

    A pooled spot has `members`, the spots in the order in which they are filled, and a cluster of its own,
    which no link reaches.
    """

    cluster: str
    owner: str
    group: NodeGroup
    chip: Chip
    chips: int
    reads_data: bool = True
    members: tuple[Spot, ...] = ()

    def places(self, chips: int) -> int:
        """Return how many stages of `chips` chips it holds, none of them over two nodes."""
        if self.members:
            return sum(one.places(chips) for one in self.members)
        node = self.group.chips_per_node
        return self.chips // node * (node // chips) + self.chips % node // chips

    def filled(self, members: Sequence[Spot]) -> Spot:
        """Return the pool with its members in another order."""
        return replace(self, members=tuple(members))

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells its stages' times and memory from those of other spots; names do not."""
        group = self.group
        scale = group.virtual
        scales = (scale.compute_scale, scale.memory_scale) if scale else ()
        return (self.chip.name, group.chips_per_node, group.network_gbps, *scales)


def eligible_clusters(pool: Pool, placement: Placement) -> tuple[Cluster, ...]:
    """Return the clusters that the job's placement admits."""
    return tuple(
        cluster
        for cluster in pool.clusters
        if (not placement.clusters or cluster.name in placement.clusters)
        and (not placement.owners or cluster.owner in placement.owners)
        and (not placement.regions or cluster.region in placement.regions)
    )


def spots_of(pool: Pool, cluster: Cluster, placement: Placement, free: FreeChips | None) -> tuple[Spot, ...]:
    """Return the node groups of a cluster that have free chips the job admits, fastest first.

    `free` None takes all chips to be free.
    """
    reads = (not placement.data_owners or cluster.owner in placement.data_owners) and (
        not placement.data_regions or cluster.region in placement.data_regions
    )
    found = []
    for group in cluster.node_groups:
        count = group.chips if free is None else free.get(cluster.name, {}).get(group.name, 0)
        count = min(count, group.chips)
        if count > 0 and (not placement.chips or group.chip in placement.chips):
            chip = pool.chip(group)
            found.append(
                Spot(
                    cluster=cluster.name, owner=cluster.owner, group=group, chip=chip,
                    chips=count, reads_data=reads,
                )
            )  # fmt: skip
    return tuple(sorted(found, key=lambda spot: -spot.chip.flop_per_s("bf16")))


def pool_of(members: Sequence[Spot]) -> Spot:
    """Return spots of one kind as one, filled in this order."""
    first = members[0]
    return Spot(
        cluster="+".join(f"{one.cluster}/{one.group.name}" for one in members),
        owner=first.owner,
        group=first.group,
        chip=first.chip,
        chips=sum(one.chips for one in members),
        reads_data=all(one.reads_data for one in members),
        members=tuple(members),
    )


def flat(spots: Iterable[Spot]) -> tuple[Spot, ...]:
    """Return spots with the members of pooled ones in their place."""
    return tuple(member for spot in spots for member in spot.members or (spot,))


def pooled_lists(spots: Sequence[Spot]) -> Iterator[tuple[Spot, ...]]:
    """Yield the spots with some of one kind pooled: every two or more of them, one pool at a time."""
    kinds = {spot.kind: [one for one in spots if one.kind == spot.kind] for spot in spots}
    for alike in kinds.values():
        for count in range(2, len(alike) + 1):
            for members in itertools.combinations(alike, count):
                yield (pool_of(members), *(spot for spot in spots if spot not in members))
