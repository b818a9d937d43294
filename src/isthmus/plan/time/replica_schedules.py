"""`replica_schedule`: the schedule that each replica of a plan runs, and which replicas run the same one.

`searched_orders` makes the orders that a plan with a searched schedule keeps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.core.plan_parts.stage_orders import StageOrders
from isthmus.plan.time.stage_costs import StageCost
from isthmus.schedule import (
    SEARCHED,
    Hop,
    PipelineCosts,
    Schedule,
    StageCosts,
    check_schedule,
    make_schedule,
    search_schedule,
    text_of_schedule,
)
from isthmus.sim import SimulatedLink, best_warm_up


def first_equal_replicas(plan: Plan) -> tuple[int, ...]:
    """Return the first equal replica of each replica, (dp,)."""
    if plan.dp == 1:
        return (0,)
    first_of: dict[tuple[object, ...], int] = {}
    pipelines: dict[int, list[Stage]] = {}
    for stage in plan.stages:
        pipelines.setdefault(stage.replica, []).append(stage)
    first_equal = []
    for replica, stages in sorted(pipelines.items()):
        content = [tuple(value for name, value in stage if name != "replica") for stage in stages]
        batches = plan.micro_batches_of(replica), plan.micro_batch_size_of(replica)
        first_equal.append(first_of.setdefault((*batches, *content), replica))
    return tuple(first_equal)


def replica_schedule(
    plan: Plan, costs: Sequence[StageCost], links: dict[tuple[str, str], SimulatedLink], replica: int
) -> Schedule:
    """Return the checked schedule of a replica.

    `overlapped` gets the fastest warm-up within memory, `searched` the fastest orders, if the plan gives none.

    Raises `PlanError` for a schedule that is unknown or does not fit the stages.
    """
    count, micro_batches = len(costs), plan.micro_batches_of(replica)
    warm_up = plan.warm_up
    if plan.schedule == "overlapped" and not warm_up:
        warm_up = _best_warm_up(costs, links, micro_batches)
    orders = plan.orders_of(replica)
    if plan.schedule == SEARCHED and not orders:
        schedule = search_schedule(
            pipeline_costs(plan, costs, links, replica), micro_batches, plan.chunks or 1
        ).schedule
    else:
        schedule = make_schedule(
            plan.schedule, count, micro_batches, warm_up=warm_up, num_chunks=plan.num_chunks, orders=orders
        )
    check_schedule(schedule)
    return schedule


def with_searched_orders(
    plan: Plan, costs_of: Callable[[int], Sequence[StageCost]], links: dict[tuple[str, str], SimulatedLink]
) -> Plan:
    """Return `plan` with a searched schedule, and its orders as text; equal replicas are searched once.

    `costs_of` returns the costs of a replica's stages. The same arguments give the same orders.
    """
    bare = plan.model_copy(update={"schedule": SEARCHED, "warm_up": (), "orders": ()})
    first_equal = first_equal_replicas(bare)
    found = []
    for first in dict.fromkeys(first_equal):
        texts = text_of_schedule(replica_schedule(bare, costs_of(first), links, first))
        replicas = tuple(replica for replica, own in enumerate(first_equal) if own == first)
        found.append(StageOrders(replicas=() if len(replicas) == plan.dp else replicas, stages=texts))
    return bare.model_copy(update={"orders": tuple(found)})


def pipeline_costs(
    plan: Plan, costs: Sequence[StageCost], links: dict[tuple[str, str], SimulatedLink], replica: int
) -> PipelineCosts:
    """Return what the search for a schedule takes of a replica; links are shared equally by the replicas that use them.

    1F1B always counts as fitting in memory.
    """
    sharing = Counter(hop for each in range(plan.dp) for hop in set(plan.hops(each)))
    hops = {}
    ends = list(itertools.pairwise(range(len(costs))))
    if (plan.num_chunks or 1) > 1 and len(costs) > 2:
        ends.append((len(costs) - 1, 0))  # from the last stage to the next chunk of the first
    for before, after in ends:
        for sender, receiver in ((before, after), (after, before)):
            a, b, load = costs[sender].load.cluster, costs[receiver].load.cluster, costs[before].load
            if a == b:
                hops[sender, receiver] = Hop(delay_s=load.hop_s)
            elif (a, b) not in links:
                raise PlanError(f"no link from {a} to {b}", hint="add the link to the pool, or remove `chunks`")
            else:
                num_pipelines = max(1, sharing[a, b] + sharing[b, a])
                transfer_s = num_pipelines * load.boundary_bytes / links[a, b].bytes_per_s
                hops[sender, receiver] = Hop(delay_s=links[a, b].delay_s, transfer_s=transfer_s)
    stages = tuple(
        _search_costs(cost, len(costs) - stage, plan.micro_batches_of(replica)) for stage, cost in enumerate(costs)
    )
    return PipelineCosts(stages=stages, hops=hops)


def _search_costs(cost: StageCost, usual_in_flight: int, micro_batches: int) -> StageCosts:
    load = cost.load
    weight_s = load.backward_s * load.weight_gradient_share
    reduced_bytes = 2 * (cost.num_reducing - 1) / cost.num_reducing * load.gradient_bytes
    return StageCosts(
        forward_s=load.forward_s,
        backward_input_s=load.backward_s - weight_s,
        backward_weight_s=weight_s,
        max_in_flight=max(usual_in_flight, min(cost.max_in_flight, micro_batches)),
        splits_backward=weight_s > 0,
        tail_s=load.update_s + reduced_bytes / load.local_bytes_per_s,
    )


def _best_warm_up(
    costs: Sequence[StageCost], links: dict[tuple[str, str], SimulatedLink], micro_batches: int
) -> tuple[int, ...]:
    """Return the fastest warm-up within memory, where 1F1B's always counts as fitting."""
    times = [StageTime(forward_s=c.load.forward_s, backward_s=c.load.backward_s) for c in costs]
    between = {}
    for index in range(len(costs) - 1):
        a, b = costs[index].load.cluster, costs[index + 1].load.cluster
        if a != b:
            between[index, index + 1] = replace(links[a, b], jitter_s=0.0, interference=None)
            between[index + 1, index] = replace(links[b, a], jitter_s=0.0, interference=None)
    plain = [min(len(costs) - stage, micro_batches) for stage in range(len(costs))]
    limits = [max(least, min(c.max_in_flight, micro_batches)) for least, c in zip(plain, costs, strict=True)]
    return best_warm_up(times, between, costs[0].load.boundary_bytes, micro_batches, limits)[0]
