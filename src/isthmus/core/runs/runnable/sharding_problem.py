"""`sharding_problem`: why this project's runtime cannot shard gradients and weights as a plan says (ZeRO 2 and 3)."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from isthmus.core.plan import Plan


class ShardingProblem(NamedTuple):
    """What of the plan the runtime lacks, and what to do instead."""

    message: str
    hint: str


class _Place(NamedTuple):
    """A stage of one replica: its place in the pipeline, and the layers of its chunks."""

    cluster: str
    replica: int
    stage: int
    layers: tuple[tuple[int, int], ...]


def sharding_problem(plan: Plan) -> ShardingProblem | None:
    """Return the first problem of a plan with ZeRO 2 or 3; None for one without, and for other plans.

    Ranks exchange gradients and weights layer by layer, in the middle of a pass. Those that do so are in one cluster
    and do the same in the same order, so that none waits for another in a circle.
    """
    if plan.zero < 2:
        return None
    if plan.num_model_copies > 1:
        return ShardingProblem(
            f"schedule {plan.schedule} holds two copies of each layer, and ZeRO {plan.zero} a part of one",
            "choose another schedule, or set zero to 1",
        )
    places = [
        _Place(stage.cluster, replica, index, layers)
        for replica in range(plan.dp)
        for index, (stage, layers) in enumerate(zip(plan.pipeline(replica), plan.chunk_layers(replica), strict=True))
    ]
    return _unlike_replicas(plan, places) or _group_over_clusters(plan, places)


def _unlike_replicas(plan: Plan, places: list[_Place]) -> ShardingProblem | None:
    """Return the problem of two replicas that share layers in a cluster and differ in the order of their work."""
    for one, other in combinations(places, 2):
        if one.cluster != other.cluster or one.replica == other.replica or not _share_layers(one, other):
            continue
        pair = f"replicas {one.replica} and {other.replica} share layers in cluster {one.cluster}"
        what = ""
        if (one.stage, one.layers) != (other.stage, other.layers):
            what = "their stages there have unlike layers or places in the pipeline"
        elif len(plan.pipeline(one.replica)) != len(plan.pipeline(other.replica)):
            what = "their pipelines have unlike numbers of stages"
        elif plan.micro_batches_of(one.replica) != plan.micro_batches_of(other.replica):
            counts = plan.micro_batches_of(one.replica), plan.micro_batches_of(other.replica)
            what = f"they run {counts[0]} and {counts[1]} micro-batches"
        elif plan.orders_of(one.replica) != plan.orders_of(other.replica):
            what = "their schedules have unlike orders"
        if what:
            return ShardingProblem(
                f"{pair}, and {what}: ZeRO {plan.zero} exchanges layers during their passes",
                "give the replicas of a cluster the same stages and micro-batches, or set zero to 1",
            )
    return None


def _group_over_clusters(plan: Plan, places: list[_Place]) -> ShardingProblem | None:
    """Return the problem of a group of replicas that shards over clusters, or over fewer than its cluster has.

    With local steps replicas shard inside their replica group at most.
    """
    stated = plan.sharding.replicas if plan.sharding else None
    for one in places:
        summed = plan.dp
        if plan.local_steps > 1:
            summed = plan.replica_groups.count(plan.replica_groups[one.replica])
        wanted = min(summed, stated or summed)
        here = sum(other.cluster == one.cluster and _share_layers(one, other) for other in places)
        if here != wanted:
            field = f"sharding.replicas {stated}" if stated else f"dp {summed} without sharding.replicas"
            return ShardingProblem(
                f"ZeRO {plan.zero} shards over {wanted} replicas ({field}), and cluster {one.cluster} has layers "
                f"{list(one.layers[0])} of {here}: the runtime shards gradients and weights inside a cluster",
                f"set sharding.replicas to {here}, if every cluster has as many, or zero to 1",
            )
    return None


def _share_layers(one: _Place, other: _Place) -> bool:
    return any(a[0] < b[1] and b[0] < a[1] for a in one.layers for b in other.layers)
