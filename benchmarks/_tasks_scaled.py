"""The tasks of `benchmarks._tasks` made S times as quick, so that one machine can rehearse them.

Seconds (of chips and of the links' delay) and rates are those of the task over S, so bytes are those over S²:
a message is cut by shortening its sequence. Every ratio of times stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._tasks import SEQUENCE, Task, pool
from isthmus.core.plan import Plan, StageTime
from isthmus.core.pool import Pool
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.replica_schedules import replica_schedule
from isthmus.plan.time.stage_costs import StageCost, stage_costs
from isthmus.schedule import Schedule

SCALES = (8, 16, 32)
"""Factors whose square divides the sequence."""

OTHERS_SHARE = 0.5
"""Of the link's rate, what the traffic of others takes in tasks 4 and 5."""


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A task as it is rehearsed: plan, times by rank, links; and its plan at full size, for the simulator."""

    whole: Plan
    plan: Plan
    times: tuple[StageTime, ...]
    pool: Pool


def pool_at(delay_ms: float) -> Pool:
    """Return the pool of the tasks with another delay, one way; its links at their nominal rates."""
    whole = pool()
    links = tuple(link.model_copy(update={"delay_ms": delay_ms}) for link in whole.links)
    return whole.model_copy(update={"links": links})


def scaled(task: Task, calibration: Calibration, delay_ms: float, scale: int) -> Scaled:
    """Return `task` with links of `delay_ms` one way, `scale` times as quick."""
    places = pool_at(delay_ms)
    plan = task.plan
    costs = [stage_costs(plan, places, task.profile, calibration, replica) for replica in range(plan.dp)]
    if task.overlapped:
        wires = simulated_links(plan, places, calibration)
        schedules = [replica_schedule(plan, each, wires, replica) for replica, each in enumerate(costs)]
        fixed = {"warm_up": _warm_up(schedules[0]), "transport": "buffered"}
        plan = plan.model_copy(update=fixed)
    small = {
        "compute": "virtual", "precision": None, "sequence_length": SEQUENCE // scale**2,
    }  # fmt: skip
    return Scaled(
        whole=plan,
        plan=plan.model_copy(update=small),
        times=tuple(_time(cost, scale) for each in costs for cost in each),
        pool=_emulated(places, calibration, scale),
    )


def _time(cost: StageCost, scale: int) -> StageTime:
    """Return what a stage's chips take, 1/S: with its update goes the reduction inside its cluster."""
    load, share = cost.load, (cost.num_reducing - 1) / cost.num_reducing
    reduce_s = 2 * share * load.gradient_bytes / load.local_bytes_per_s
    return StageTime(
        forward_s=load.forward_s / scale,
        backward_s=load.backward_s / scale,
        update_s=(load.update_s + reduce_s) / scale,
    )


def _warm_up(schedule: Schedule) -> tuple[int, ...]:
    """Return the warm-up counts that an overlapped schedule was made with."""
    counts = []
    for stage in schedule.stages:
        kinds = [one.kind for one in stage if one.kind in ("forward", "backward")]
        counts.append(kinds.index("backward") - 1)
    return tuple(counts)


def _emulated(places: Pool, calibration: Calibration, scale: int) -> Pool:
    """Return the links as the emulator is to make them, and one more like the first for traffic of others."""
    links = [
        link.model_copy(
            update={
                "bandwidth_gbps": link.bandwidth_gbps * _share(calibration, link.source, link.target) / scale,
                "delay_ms": link.delay_ms / scale,
            }
        )
        for link in places.links
    ]
    pattern, (here, there) = places.clusters[0], ("others-a", "others-b")
    links += [links[0].model_copy(update={"source": a, "target": b}) for a, b in ((here, there), (there, here))]
    more = tuple(pattern.model_copy(update={"name": name}) for name in (here, there))
    return places.model_copy(update={"clusters": (*places.clusters, *more), "links": tuple(links)})


def _share(calibration: Calibration, source: str, target: str) -> float:
    return calibration.value("wan_share", f"{source}>{target}")
