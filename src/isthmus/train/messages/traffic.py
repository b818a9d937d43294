"""`lanes_between`: the number of connections between two ranks."""

from __future__ import annotations

from isthmus.core.plan import Plan


def lanes_between(plan: Plan, rank: int, other: int, lanes: int) -> int:
    """Return `lanes` for ranks of `plan` that exchange tensors, else 1 (heartbeats and small collectives).

    Tensors go between neighbouring stages of a replica, between its first and last (interleaved schedules,
    tied embeddings), and between replicas. Symmetric in the two ranks.
    """
    stage_index, other_index = (plan.ranks[one].stage for one in (rank, other))
    replica = plan.stages[stage_index].replica
    if plan.stages[other_index].replica != replica:
        return lanes
    stages = [i for i, stage in enumerate(plan.stages) if stage.replica == replica]
    distance = abs(stages.index(stage_index) - stages.index(other_index))
    return lanes if distance in (0, 1, len(stages) - 1) else 1
