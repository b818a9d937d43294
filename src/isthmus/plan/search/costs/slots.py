"""`Spot`: a node group with its free chips; `spots_of` applies the job's placement.

Slots of one kind may be **pooled**: they are filled one after the other as a single slot, so that a stage may
have replicas in several clusters. `pooled_lists` enumerates the pools.
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
    """`chips` free chips of one node group, or a pool of slots."""

    cluster: str
    owner: str
    group: NodeGroup
    chip: Chip
    chips: int
    # Whether its stages may be first or last of a pipeline.
    reads_data: bool = True
    # Slots of a pool in filling order; `cluster` is then a synthetic name without links.
    members: tuple[Spot, ...] = ()

    def places(self, chips: int) -> int:
        """Return how many stages of `chips` chips fit, each within one node."""
        if self.members:
            return sum(one.places(chips) for one in self.members)
        node = self.group.chips_per_node
        return self.chips // node * (node // chips) + self.chips % node // chips

    def filled(self, members: Sequence[Spot]) -> Spot:
        """Return the pool with its members in another order."""
        return replace(self, members=tuple(members))

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for slots whose stages have the same times and memory."""
        group = self.group
        scale = group.virtual
        scales = (scale.compute_scale, scale.memory_scale) if scale else ()
        return (self.chip.name, group.chips_per_node, group.network_gbps, *scales)


def eligible_clusters(pool: Pool, placement: Placement) -> tuple[Cluster, ...]:
    """Return the clusters that the job's placement allows."""
    return tuple(
        cluster
        for cluster in pool.clusters
        if (not placement.clusters or cluster.name in placement.clusters)
        and (not placement.owners or cluster.owner in placement.owners)
        and (not placement.regions or cluster.region in placement.regions)
    )


def spots_of(pool: Pool, cluster: Cluster, placement: Placement, free: FreeChips | None) -> tuple[Spot, ...]:
    """Return the slots of a cluster: node groups with free chips that the job allows, fastest first.

    `free` None: all chips are free.
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
    return tuple(sorted(found, key=lambda slot: -slot.chip.flop_per_s("bf16")))


def pool_of(members: Sequence[Spot]) -> Spot:
    """Return slots of one kind as one pool, filled in this order."""
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
    """Return slots with pools replaced by their members."""
    return tuple(member for slot in spots for member in slot.members or (slot,))


def pooled_lists(spots: Sequence[Spot]) -> Iterator[tuple[Spot, ...]]:
    """Yield the slots with one pool of two or more of one kind, for every such pool."""
    kinds = {slot.kind: [one for one in spots if one.kind == slot.kind] for slot in spots}
    for same_kind in kinds.values():
        for count in range(2, len(same_kind) + 1):
            for members in itertools.combinations(same_kind, count):
                yield (pool_of(members), *(slot for slot in spots if slot not in members))
