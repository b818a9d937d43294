"""`num_connections`: the number of connections between two ranks."""

from __future__ import annotations

from isthmus.core.plan import Plan


def num_connections(plan: Plan, rank: int, peer: int, max_connections: int) -> int:
    """Return `max_connections` for ranks of `plan` that exchange tensors, else 1 (heartbeats and small collectives).

    Tensors go between neighbouring stages of a replica, between its first and last (interleaved schedules,
    tied embeddings), and between replicas. Symmetric in the two ranks.
    """
    stage_index, other_index = (plan.ranks[one].stage for one in (rank, peer))
    replica = plan.stages[stage_index].replica
    if plan.stages[other_index].replica != replica:
        return max_connections
    stages = [i for i, stage in enumerate(plan.stages) if stage.replica == replica]
    distance = abs(stages.index(stage_index) - stages.index(other_index))
    return max_connections if distance in (0, 1, len(stages) - 1) else 1
