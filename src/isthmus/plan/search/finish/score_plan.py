"""`score_plan`: simulate a plan at the costs that `isthmus simulate` uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.time.calibration import DATA_SHEET, Calibration
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.replica_schedules import first_equal_replicas, replica_schedule, with_searched_orders
from isthmus.plan.time.stage_costs import StageCost, stage_costs
from isthmus.schedule import SEARCHED, Schedule, make_schedule
from isthmus.sim import Replica, SimulatedTraining, SimulationResult, StageLoad, simulate_training

EMULATED = DATA_SHEET.with_values({"wan_share": 1.0}).model_copy(
    update={"name": "emulated", "source": "chips paced to their plan, links emulated at their rate"}
)
"""Calibration of virtual chips: they take the predicted time, and their links reach the pool's rates."""


def calibration_for(pool: Pool) -> Calibration:
    """Return the calibration of a pool: data sheets, or emulation if chips are virtual."""
    virtual = any(group.virtual for cluster in pool.clusters for group in cluster.node_groups)
    return EMULATED if virtual else DATA_SHEET


def score_plan(plan: Plan, pool: Pool, workload: TrainingWorkload) -> SimulationResult:
    """Return one simulated iteration of `plan`, without spans; equal replicas are simulated once.

    Raises `PlanError` for a plan that the model or the links do not allow.
    """
    plan = plan.model_copy(update={"precision": workload.precision})  # plans for the runtime leave it unset
    wires = simulated_links(plan, pool, workload.calibration)
    replicas = []
    for first, count in Counter(first_equal_replicas(plan)).items():
        costs = _costs(plan, pool, workload, first)
        loads = tuple(cost.load for cost in costs)
        micro_batches = plan.micro_batches_of(first)
        if (plan.schedule == "overlapped" and not plan.warm_up) or plan.schedule == SEARCHED:
            schedule = replica_schedule(plan, costs, wires, first)
        else:
            schedule = _schedule(plan.schedule, len(loads), micro_batches, plan.warm_up)
        replicas.append(Replica(stages=loads, schedule=schedule, count=count))
    return simulate_training(
        SimulatedTraining(replicas=tuple(replicas), links=wires, local_steps=plan.local_steps), details=False
    )


def search_orders(plan: Plan, pool: Pool, workload: TrainingWorkload) -> Plan:
    """Return `plan` with a schedule searched for its stages and links, at the costs of `score_plan`.

    Raises `PlanError` for a plan that the model or the links do not allow.
    """
    priced = plan.model_copy(update={"precision": workload.precision})
    wires = simulated_links(priced, pool, workload.calibration)
    found = with_searched_orders(priced, lambda replica: _costs(priced, pool, workload, replica), wires)
    return found.model_copy(update={"precision": plan.precision})


def _costs(plan: Plan, pool: Pool, workload: TrainingWorkload, replica: int) -> Sequence[StageCost]:
    """Return the costs of a replica's stages; on virtual chips with the paced times."""
    costs = stage_costs(plan, pool, workload.profile, workload.calibration, replica)
    return tuple(replace(cost, load=_load(plan, pool, workload, cost)) for cost in costs)


@lru_cache(maxsize=256)
def _schedule(name: str, num_stages: int, micro_batches: int, warm_up: tuple[int, ...]) -> Schedule:
    """Return a generated schedule. Skips the checker: the generators' tests cover it."""
    return make_schedule(name, num_stages, micro_batches, warm_up=warm_up)


def _load(plan: Plan, pool: Pool, workload: TrainingWorkload, cost: StageCost) -> StageLoad:
    """Return a stage's load; on virtual chips with the paced times."""
    cluster = pool.cluster(cost.stage.cluster)
    group = cluster.group(cost.stage.node_group)
    if group.virtual is None:
        return cost.load
    slot = ChipSlot(
        cluster=cluster.name, owner=cluster.owner, group=group, chip=pool.chip(group), chips=group.num_chips
    )
    cost_table = StageCostTable(workload, slot, StageDegrees(), plan.micro_batch_size_of(cost.stage.replica))
    recomputed = 0 if cost.stage.recompute == "none" else cost.stage.recompute_layers
    timed = cost_table.time_stage(*cost.stage.layers, cost.stage.num_layers if recomputed is None else recomputed)
    return replace(cost.load, forward_s=timed.forward_s, backward_s=timed.backward_s, update_s=0.0, hop_s=0.0)
