"""`score`: simulate a plan at the costs that `isthmus simulate` uses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.memory.stage_memory import Degrees
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_costs import Seat
from isthmus.plan.search.costs.task import Task
from isthmus.plan.time.calibration import DATA_SHEET, Calibration
from isthmus.plan.time.loads import StageCost, distinct_replicas, schedule_of, stage_costs, wires_of
from isthmus.schedule import Schedule, make_schedule
from isthmus.sim import Replica, StageLoad, Training, TrainingRun, simulate

EMULATED = DATA_SHEET.with_values({"wan_share": 1.0}).model_copy(
    update={"name": "emulated", "source": "chips paced to their plan, links emulated at their rate"}
)
"""Calibration of virtual chips: they take the predicted time, and their links reach the pool's rates."""


def calibration_for(pool: Pool) -> Calibration:
    """Return the calibration of a pool: data sheets, or emulation if chips are virtual."""
    virtual = any(group.virtual for cluster in pool.clusters for group in cluster.node_groups)
    return EMULATED if virtual else DATA_SHEET


def score(plan: Plan, pool: Pool, task: Task) -> TrainingRun:
    """Return one simulated iteration of `plan`, without spans; equal replicas are simulated once.

    Raises `PlanError` for a plan that the model or the links do not allow.
    """
    plan = plan.model_copy(update={"precision": task.precision})  # plans for the runtime leave it unset
    wires = wires_of(plan, pool, task.calibration)
    replicas = []
    for first, count in Counter(distinct_replicas(plan)).items():
        costs = stage_costs(plan, pool, task.profile, task.calibration, first)
        loads = tuple(_load(plan, pool, task, cost) for cost in costs)
        micro_batches = plan.micro_batches_of(first)
        if plan.schedule == "overlapped" and not plan.warm_up:
            costs = tuple(replace(cost, load=load) for cost, load in zip(costs, loads, strict=True))
            schedule = schedule_of(plan, costs, wires, first)
        else:
            schedule = _schedule(plan.schedule, len(loads), micro_batches, plan.warm_up)
        replicas.append(Replica(stages=loads, schedule=schedule, count=count))
    return simulate(
        Training(replicas=tuple(replicas), wires=wires, local_steps=plan.local_steps), details=False
    )


@lru_cache(maxsize=256)
def _schedule(name: str, num_stages: int, micro_batches: int, warm_up: tuple[int, ...]) -> Schedule:
    """Return a generated schedule. Skips the checker: the generators' tests cover it."""
    return make_schedule(name, num_stages, micro_batches, warm_up=warm_up)


def _load(plan: Plan, pool: Pool, task: Task, cost: StageCost) -> StageLoad:
    """Return a stage's load; on virtual chips with the paced times."""
    cluster = pool.cluster(cost.stage.cluster)
    group = cluster.group(cost.stage.node_group)
    if group.virtual is None:
        return cost.load
    slot = Spot(
        cluster=cluster.name, owner=cluster.owner, group=group, chip=pool.chip(group), chips=group.chips
    )
    cost_table = Seat(task, slot, Degrees(), plan.micro_batch_size_of(cost.stage.replica))
    recomputed = 0 if cost.stage.recompute == "none" else cost.stage.recompute_layers
    timed = cost_table.timed(*cost.stage.layers, cost.stage.num_layers if recomputed is None else recomputed)
    return replace(cost.load, forward_s=timed.forward_s, backward_s=timed.backward_s, update_s=0.0, hop_s=0.0)
