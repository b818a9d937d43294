"""`Spot`: a node group with its free chips, as the planner sees it; `spots_of` applies the placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.core.chip import Chip
from isthmus.core.job import Placement
from isthmus.core.pool import Cluster, NodeGroup, Pool

FreeChips = Mapping[str, Mapping[str, int]]
"""Free chips by cluster and node group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spot:
    """`chips` free chips of one node group. `reads_data`: its stages may be first or last of a replica."""

    cluster: str
    owner: str
    group: NodeGroup
    chip: Chip
    chips: int
    reads_data: bool = True

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
