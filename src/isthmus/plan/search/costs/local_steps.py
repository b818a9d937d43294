"""`local_ring_s`: communication between groups of clusters that average parameters every few steps.

Local steps change the training result, so a job must allow them (`training.local_steps`). They are a search
space of their own, in which replica groups that share no cluster reduce no gradients with each other: each
set of connected groups has its own ring every step, and all of them 1/H of a parameter average. Cost tables
include the outer optimizer's memory. Source: A. Douillard et al., "DiLoCo: distributed low-communication
training of language models", 2023; weighting unequal groups by their samples is our addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from isthmus.core.plan import group_replicas_by_cluster
from isthmus.plan.search.costs.slots import ChipSlot

ReplicaGroups = Sequence[Sequence[ChipSlot]]


def local_ring_s(
    replica_groups: ReplicaGroups,
    local_steps: int,
    reduce_s: Callable[[ReplicaGroups], float],
    average_s: Callable[[ReplicaGroups], float],
) -> float:
    """Return the mean seconds per step of the rings between clusters; infinite if all groups are connected.

    `reduce_s(islands)` is the ring that reduces gradients, `average_s` the one that averages parameters.
    """
    groups = group_replicas_by_cluster([{slot.cluster for slot in replica_group} for replica_group in replica_groups])
    if len(set(groups)) < 2:
        return math.inf
    parts = [[one for one, group in zip(replica_groups, groups, strict=True) if group == n] for n in set(groups)]
    return max(map(reduce_s, parts)) + average_s(replica_groups) / local_steps
