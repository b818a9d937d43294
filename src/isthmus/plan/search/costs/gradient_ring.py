"""`gradient_ring_s`: seconds of the ring of all gradients over the clusters of several replica groups."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.workload import TrainingWorkload


def gradient_ring_s(
    workload: TrainingWorkload, routes: Routes, slots: Sequence[Sequence[ChipSlot]], zero: int
) -> float:
    """Return the seconds of the ring of all gradients over the groups' clusters (infinite: not linked).

    Same model as the simulator: clusters in order of first use, the parts of all members on the same links.
    """
    names = list(dict.fromkeys(slot.cluster for replica_group in slots for slot in replica_group))
    if len(slots) < 2 or len(names) < 2:
        return 0.0
    num_bytes = 4.0 * workload.profile.num_parameters * (0.75 if zero else 1.0)
    return routes.ring_s(names, num_bytes)
