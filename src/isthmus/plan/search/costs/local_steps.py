"""`local_ring_s`: what replicas in several groups of clusters send, averaging every few steps.

Local steps change what is learned, so a job must admit them (`training.local_steps`). They are searched as a
space of their own, in which islands that share no cluster reduce no gradients with each other: every group of
islands has a ring of its own every step, and all of them 1/H of an average of the parameters. Seats hold the
outer optimizer beside the other. Source: A. Douillard et al., "DiLoCo: distributed low-communication training
of language models", 2023; that unlike groups weigh in an average by their samples is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from isthmus.core.plan import group_by_cluster
from isthmus.plan.search.costs.slots import Spot

Islands = Sequence[Sequence[Spot]]


def local_ring_s(
    islands: Islands,
    local_steps: int,
    reduce_s: Callable[[Islands], float],
    average_s: Callable[[Islands], float],
) -> float:
    """Return the mean seconds a step of the rings between clusters; infinite where all islands are one group.

    `reduce_s(islands)` is the ring that reduces gradients, `average_s` the one that averages parameters.
    """
    groups = group_by_cluster([{spot.cluster for spot in island} for island in islands])
    if len(set(groups)) < 2:
        return math.inf
    parts = [[one for one, group in zip(islands, groups, strict=True) if group == n] for n in set(groups)]
    return max(map(reduce_s, parts)) + average_s(islands) / local_steps
