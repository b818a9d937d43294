"""`joined_ring_s`: seconds of a layout's gradient ring, with the reduction between unlike node groups of one cluster.

Before layers are split only a lower bound of that reduction is known (`gradient_ring.py`), none where a replica group
has several slots. A layout knows which layers two node groups share: it charges what the time model does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from isthmus.plan.search.costs.gradient_ring import node_groups_s
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape, PipelineSplit
from isthmus.plan.time.replica_reduction import ReplicaPlace, replicas_all_reduce_s

Placed = tuple[PipelineShape, PipelineSplit]


def joined_ring_s(chosen: Sequence[Placed], ring_s: float) -> float:
    """Return `ring_s`, the seconds known before the split, with those between the node groups of a cluster.

    `chosen` has one split pipeline per replica group. Virtual chips reduce at no cost, pooled slots stay as they are.
    """
    groups = [tuple(dict.fromkeys(shape.slots)) for shape, _ in chosen]
    if len(chosen) < 2 or chosen[0][0].workload.local_steps > 1 or any(shape.pooled for shape, _ in chosen):
        return ring_s
    places = [(slot.cluster, slot.group.name) for slot in itertools.chain(*groups)]
    if len(set(places)) == len({cluster for cluster, _ in places}):
        return ring_s  # no cluster has two node groups
    rows = [
        (shape, stage, layers)
        for shape, split in chosen
        for stage, layers in enumerate(split.layers)
        if not shape.cost_tables[stage].virtual
    ]
    joined_s = max((_joined_s(one, rows) for one in rows), default=0.0)
    workload, zero = chosen[0][0].workload, max(shape.requested_zero for shape, _ in chosen)
    known_s = node_groups_s(workload, groups, 4.0 * workload.profile.num_parameters * (0.75 if zero else 1.0))
    return ring_s + max(0.0, joined_s - known_s)


def _joined_s(
    row: tuple[PipelineShape, int, tuple[int, int]], rows: Sequence[tuple[PipelineShape, int, tuple[int, int]]]
) -> float:
    """Return how much longer a stage reduces with the replicas in other node groups of its cluster than in its own."""
    shape, stage, (first, last) = row
    slot, table = shape.slots[stage], shape.cost_tables[stage]
    shares: dict[str, float] = {slot.group.name: 0.0}
    chips, topologies = {slot.group.name: table.num_chips}, {slot.group.name: table.chip_model.topology}
    for other, index, layers in rows:
        place, common = other.slots[index], min(last, layers[1]) - max(first, layers[0])
        if common > 0 and place.cluster == slot.cluster:
            name, other_table = place.group.name, other.cost_tables[index]
            shares[name] = shares.get(name, 0.0) + other.dp * common / (last - first)
            chips[name] = min(chips.get(name, other_table.num_chips), other_table.num_chips)
            topologies[name] = other_table.chip_model.topology
    if len(shares) < 2:
        return 0.0
    found = [
        ReplicaPlace(topology=topologies[name], count=math.ceil(share - 1e-9), num_chips=chips[name])
        for name, share in shares.items()
    ]
    num_bytes = shape.gradient_bytes(table, table.parameters(first, last))
    own = ReplicaPlace(topology=table.chip_model.topology, count=shape.dp, num_chips=table.num_chips)
    own_s = replicas_all_reduce_s([own], num_bytes) if shape.dp > 1 else 0.0
    return replicas_all_reduce_s(found, num_bytes) - own_s
