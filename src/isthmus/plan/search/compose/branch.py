"""`Branch`: what the search fixes before it ranks pipelines."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.plan.search.chains.replica_groups import Island
from isthmus.plan.search.compose.layout import Layout


@dataclass(frozen=True)
class Branch:
    """Replica groups, micro-batch size (0: mixed sizes) and schedule, with ring time and lower bound."""

    islands: tuple[Island, ...]
    micro_batch_size: int
    schedule: str
    ring_s: float
    promise_s: float


BranchKey = tuple[frozenset[frozenset[tuple[str, str]]], int, str]
"""A branch by names: groups of (cluster, node group), micro-batch size (0: mixed sizes), schedule."""


def branch_of(layout: Layout) -> BranchKey:
    """Return the branch that a layout belongs to."""
    replica_groups = (
        frozenset((one.spot.cluster, one.spot.group.name) for one in row.shape.segments)
        for row in layout.rows
    )
    return frozenset(replica_groups), 0 if layout.unlike_sizes else layout.micro_batch_size, layout.schedule
