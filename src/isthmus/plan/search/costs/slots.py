"""`ChipSlot`: a node group with its free chips; `cluster_slots` applies the job's placement.

Slots of one kind may be **pooled**: they are filled one after the other as a single slot, so that a stage may
have replicas in several clusters. `pooled_combinations` enumerates the pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from isthmus.core.chip import Chip
from isthmus.core.job import PlacementConstraints
from isthmus.core.pool import Cluster, NodeGroup, Pool

FreeChips = Mapping[str, Mapping[str, int]]
"""Free chips by cluster and node group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChipSlot:
    """`chips` free chips of one node group, or a pool of slots."""

    cluster: str
    owner: str
    group: NodeGroup
    chip: Chip
    chips: int
    # Whether its stages may be first or last of a pipeline.
    reads_data: bool = True
    # Slots of a pool in filling order; `cluster` is then a synthetic name without links.
    members: tuple[ChipSlot, ...] = ()

    def stage_capacity(self, stage_chips: int) -> int:
        """Return how many stages of `stage_chips` chips fit, each within one node."""
        if self.members:
            return sum(one.stage_capacity(stage_chips) for one in self.members)
        node = self.group.num_linked_chips
        return self.chips // node * (node // stage_chips) + self.chips % node // stage_chips

    def with_fill_order(self, members: Sequence[ChipSlot]) -> ChipSlot:
        """Return the pool with its members in another order."""
        return replace(self, members=tuple(members))

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """A key that is equal for slots whose stages have the same times and memory."""
        group = self.group
        scale = group.virtual
        scales = (scale.compute_scale, scale.memory_scale) if scale else ()
        return (self.chip.name, group.num_linked_chips, group.network_gbps, *scales)


def eligible_clusters(pool: Pool, placement: PlacementConstraints) -> tuple[Cluster, ...]:
    """Return the clusters that the job's placement allows."""
    return tuple(one for one in pool.clusters if placement.admits(one.name, one.owner, one.region))


def cluster_slots(
    pool: Pool, cluster: Cluster, placement: PlacementConstraints, free_chips: FreeChips | None
) -> tuple[ChipSlot, ...]:
    """Return the slots of a cluster: node groups with free chips that the job allows, fastest first.

    `free_chips` None: all chips are free.
    """
    reads = placement.may_read_data(cluster.owner, cluster.region)
    found = []
    for group in cluster.node_groups:
        count = group.num_chips if free_chips is None else free_chips.get(cluster.name, {}).get(group.name, 0)
        count = min(count, group.num_chips)
        if count > 0 and (not placement.chips or group.chip in placement.chips):
            chip = pool.chip(group)
            found.append(
                ChipSlot(
                    cluster=cluster.name, owner=cluster.owner, group=group, chip=chip,
                    chips=count, reads_data=reads,
                )
            )  # fmt: skip
    return tuple(sorted(found, key=lambda slot: -slot.chip.flop_per_s("bf16")))


def pool_slots(members: Sequence[ChipSlot]) -> ChipSlot:
    """Return slots of one kind as one pool, filled in this order."""
    first = members[0]
    return ChipSlot(
        cluster="+".join(f"{one.cluster}/{one.group.name}" for one in members),
        owner=first.owner,
        group=first.group,
        chip=first.chip,
        chips=sum(one.chips for one in members),
        reads_data=all(one.reads_data for one in members),
        members=tuple(members),
    )


def flatten_pools(slots: Iterable[ChipSlot]) -> tuple[ChipSlot, ...]:
    """Return slots with pools replaced by their members."""
    return tuple(member for slot in slots for member in slot.members or (slot,))


def pooled_combinations(slots: Sequence[ChipSlot]) -> Iterator[tuple[ChipSlot, ...]]:
    """Yield the slots with one pool of two or more of one kind, for every such pool."""
    kinds = {slot.kind: [one for one in slots if one.kind == slot.kind] for slot in slots}
    for same_kind in kinds.values():
        for count in range(2, len(same_kind) + 1):
            for members in itertools.combinations(same_kind, count):
                yield (pool_slots(members), *(slot for slot in slots if slot not in members))
