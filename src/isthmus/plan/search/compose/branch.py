"""`Branch`: what the search decides before it looks at chains of stages."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.plan.search.chains.replica_groups import Island
from isthmus.plan.search.compose.layout import Layout


@dataclass(frozen=True)
class Branch:
    """Islands, a micro-batch size (0: unlike ones), a schedule, and the least seconds that they promise."""

    islands: tuple[Island, ...]
    micro_batch_size: int
    schedule: str
    ring_s: float
    promise_s: float


BranchKey = tuple[frozenset[frozenset[tuple[str, str]]], int, str]
"""A branch by names: islands of (cluster, node group), micro-batch size (0: unlike ones), schedule."""


def branch_of(layout: Layout) -> BranchKey:
    """Return the branch that a layout was found on."""
    islands = (
        frozenset((one.spot.cluster, one.spot.group.name) for one in row.shape.segments)
        for row in layout.rows
    )
    return frozenset(islands), 0 if layout.unlike_sizes else layout.micro_batch_size, layout.schedule
