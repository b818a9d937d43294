"""`ring_s`: seconds of the ring of all gradients over the clusters of several replica groups."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.plan.search.costs.routes import Ways
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.task import Task


def ring_s(task: Task, ways: Ways, spots: Sequence[Sequence[Spot]], zero: int) -> float:
    """Return the seconds of the ring of all gradients over the groups' clusters (infinite: not linked).

    Same model as the simulator: clusters in order of first use, the parts of all members on the same links.
    """
    names = list(dict.fromkeys(slot.cluster for replica_group in spots for slot in replica_group))
    if len(spots) < 2 or len(names) < 2:
        return 0.0
    num_bytes = 4.0 * task.profile.num_parameters * (0.75 if zero else 1.0)
    return ways.ring_s(names, num_bytes)
