"""`lanes_between`: by how many connections two ranks are joined: as many as asked for where tensors go."""

from __future__ import annotations

from isthmus.core.plan import Plan


def lanes_between(plan: Plan, rank: int, other: int, lanes: int) -> int:
    """Return `lanes` for two ranks of `plan` that exchange tensors, else 1: heartbeats and small collectives.

    Tensors go between neighbouring stages of a replica, its last and its first (an interleaved schedule goes
    round, a tied embedding has an end at both), and between replicas. The same for both of a pair.
    """
    here, there = (plan.ranks[one].stage for one in (rank, other))
    replica = plan.stages[here].replica
    if plan.stages[there].replica != replica:
        return lanes
    places = [i for i, stage in enumerate(plan.stages) if stage.replica == replica]
    apart = abs(places.index(here) - places.index(there))
    return lanes if apart in (0, 1, len(places) - 1) else 1
