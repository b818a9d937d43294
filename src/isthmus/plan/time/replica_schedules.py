"""`replica_schedule`: the schedule that each replica of a plan runs, and which replicas run the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from isthmus.core.plan import Plan, Stage, StageTime
from isthmus.plan.time.stage_costs import StageCost
from isthmus.schedule import Schedule, check_schedule, make_schedule
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
    """Return the checked schedule of a replica; `overlapped` gets the fastest warm-up within memory.

    Raises `PlanError` for a schedule that is unknown or does not fit the stages.
    """
    count, micro_batches = len(costs), plan.micro_batches_of(replica)
    warm_up = plan.warm_up
    if plan.schedule == "overlapped" and not warm_up:
        warm_up = _best_warm_up(costs, links, micro_batches)
    schedule = make_schedule(plan.schedule, count, micro_batches, warm_up=warm_up, num_chunks=plan.num_chunks)
    check_schedule(schedule)
    return schedule


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
