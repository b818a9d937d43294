"""`gradient_ring_s`: seconds of the ring of all gradients over the clusters of several replica groups."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.workload import REDUCED_RATIO, TrainingWorkload


def gradient_ring_s(
    workload: TrainingWorkload, routes: Routes, slots: Sequence[Sequence[ChipSlot]], zero: int
) -> float:
    """Return the seconds of the ring of all gradients over the groups' clusters (infinite: not linked).

    Same model as the simulator: clusters in order of first use, the parts of all members on the same links. Groups
    in unlike node groups of one cluster first reduce over their nodes' networks, all chips at once.
    """
    if len(slots) < 2:
        return 0.0
    num_bytes = 4.0 * workload.profile.num_parameters * REDUCED_RATIO[zero]
    names = list(dict.fromkeys(slot.cluster for replica_group in slots for slot in replica_group))
    near_s = node_groups_s(workload, slots, num_bytes)
    return near_s + (routes.ring_s(names, num_bytes) if len(names) > 1 else 0.0)


def node_groups_s(workload: TrainingWorkload, slots: Sequence[Sequence[ChipSlot]], num_bytes: float) -> float:
    """Return the seconds of the reduction between node groups, where every group of replicas is in one of them.

    A lower bound elsewhere: 0 where a group of replicas has several slots, whose layers are not split yet.
    """
    by_cluster: dict[str, dict[str, float]] = {}
    for replica_group in slots:
        if len(replica_group) > 1:
            return 0.0
        for slot in replica_group:
            share = workload.calibration.value("network_share", slot.chip.name)
            rate = 0.0 if slot.group.virtual else slot.chips * slot.group.network_gbps * 1e9 / 8 * share
            by_cluster.setdefault(slot.cluster, {})[slot.group.name] = rate
    seconds = [
        2 * (len(rates) - 1) / len(rates) * num_bytes / min(rates.values())
        for rates in by_cluster.values()
        if len(rates) > 1 and min(rates.values()) > 0
    ]
    return max(seconds, default=0.0)
