"""`shape_bound`: a lower bound on a pipeline of equal layers that knows its hops, before its layers are split.

The bounds of `enumerate_pipelines` hold for whole groups of pipelines and omit what depends on the order of stages: a
micro-batch in flight must return before another one starts, a pooled slot sends over the links of its members, and
replicas in several clusters reduce their gradients between these.
"""

from __future__ import annotations

import itertools

from isthmus.plan.search.costs.slots import flatten_pools
from isthmus.plan.search.pipelines.pipeline_shape import PipelineCost, PipelineShape


def shape_bound(shape: PipelineShape, cost: PipelineCost) -> PipelineCost:
    """Return lower bounds on the times of a shape, at least `cost`; its layers are equal."""
    bounds = [_hop_bound(one) for one in shape.uniform_shapes]
    first_s, interval_s = max(one.first_s for one in bounds), max(one.interval_s for one in bounds)
    if shape.pooled:
        names = (one.cluster for one in flatten_pools(segment.slot for segment in shape.segments))
        path = shape.routes.path_costs(tuple(name for name, _ in itertools.groupby(names)))
        interval_s = max(interval_s, shape.dp * shape.message_bytes * path.slowest_s_per_byte)
        first_s += _least_ring_s(shape)
    return PipelineCost(max(cost.first_s, first_s), max(cost.interval_s, interval_s))


def _hop_bound(shape: PipelineShape) -> PipelineCost:
    """Return bounds for one layer at each stage, the others on the fastest chips, and every hop of a round trip."""
    tables, hops_s = shape.cost_tables, shape.hops_s
    seconds = [one.mean_layer_s for one in tables]
    spare_s = (shape.workload.profile.num_layers - len(tables)) * min(seconds)
    seconds[0] += tables[0].embedding_s
    seconds[-1] += tables[-1].head_s
    later_s, interval_s, last = seconds[-1], 0.0, len(tables) - 1
    for stage in range(last, -1, -1):
        if stage < last:
            later_s += seconds[stage] + 2 * hops_s[stage]
        each_s = (later_s if stage else later_s + spare_s) / shape.max_in_flight(stage)
        if each_s > interval_s:
            interval_s = each_s
    return PipelineCost(later_s + spare_s, max(interval_s, shape.wire_s) * (1 - 1e-9))


def _least_ring_s(shape: PipelineShape) -> float:
    """Return the least seconds of the gradient rings between the clusters of a pooled slot, for any split."""
    stages = [(one.cost_table, names) for one in shape.segments for names in shape.stage_clusters(one)]
    crossing = [(table, names) for table, names in stages if len(names) > 1]
    if not crossing:
        return 0.0
    all_cross = len(crossing) == len(stages)
    layers = -(-shape.workload.profile.num_layers // len(stages)) if all_cross else 1
    rings_s = [
        shape.routes.ring_s(names, shape.gradient_bytes(table, layers * table.least_parameters))
        for table, names in dict.fromkeys(crossing)
    ]
    return min(rings_s) if all_cross else max(rings_s)
