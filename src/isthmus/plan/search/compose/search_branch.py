"""`SearchBranch`: what the search fixes before it ranks pipelines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.costs.slots import flatten_pools
from isthmus.plan.search.pipelines.replica_groups import ReplicaGroup


@dataclass(frozen=True)
class SearchBranch:
    """Replica groups, micro-batch size (0: mixed sizes) and schedule, with ring time and lower bound."""

    replica_groups: tuple[ReplicaGroup, ...]
    micro_batch_size: int
    schedule: str
    ring_s: float
    lower_bound_s: float

    @cached_property
    def clusters(self) -> tuple[str, ...]:
        """The clusters of all its slots, sorted by name."""
        return tuple(sorted({one.cluster for one in flatten_pools(itertools.chain(*self.replica_groups))}))


BranchKey = tuple[frozenset[frozenset[tuple[str, str]]], int, str]
"""A branch by names: groups of (cluster, node group), micro-batch size (0: mixed sizes), schedule."""


def branch_key(layout: PlanLayout) -> BranchKey:
    """Return the branch that a layout belongs to."""
    replica_groups = (
        frozenset((one.slot.cluster, one.slot.group.name) for one in row.shape.segments) for row in layout.pipelines
    )
    return frozenset(replica_groups), 0 if layout.mixed_sizes else layout.micro_batch_size, layout.schedule
