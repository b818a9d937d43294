"""`plan_energy_j`: the energy of a simulated step: chips draw their power while busy, idle power while they wait."""

from __future__ import annotations

from collections import Counter

from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.time.replica_schedules import first_equal_replicas
from isthmus.sim import SimulationResult, StageResult


def plan_energy_j(plan: Plan, pool: Pool, run: SimulationResult) -> float:
    """Return the joules that the chips of `plan` draw in one iteration of its simulation.

    `run` has the stages of every replica, or of the first of equal ones.
    """
    given: dict[int, list[StageResult]] = {}
    for one in run.stages:
        given.setdefault(one.replica, []).append(one)
    counts = Counter(first_equal_replicas(plan) if len(given) < plan.dp else range(plan.dp))
    total_j = 0.0
    for (replica, count), stages in zip(counts.items(), given.values(), strict=True):
        for stage, found in zip(plan.pipeline(replica), stages, strict=True):
            chip = pool.chip(pool.node_group(stage.cluster, stage.node_group))
            busy_s = min(found.busy_s, run.iteration_s)
            watt_s = chip.power_w * busy_s + chip.waiting_power_w * (run.iteration_s - busy_s)
            total_j += count * stage.num_chips * watt_s
    return total_j
