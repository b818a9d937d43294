"""`training_of`: a plan on a pool, with the costs of its stages, as something to simulate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from isthmus.core.errors import InputError
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.schedule import Schedule, make_schedule
from isthmus.sim.training import Ends, Replica, StageLoad, Training
from isthmus.sim.wire import Interference, Wire, wire_of


def training_of(
    plan: Plan,
    pool: Pool,
    loads: Sequence[StageLoad],
    *,
    schedules: Mapping[int, Schedule] | None = None,
    interference: Mapping[Ends, Interference] | None = None,
    seed: int = 0,
) -> Training:
    """Return the training that `plan` describes, over the links of `pool`.

    `loads[i]` is the cost of `plan.stages[i]`; its cluster and layers are taken from there. `schedules` gives
    a replica another schedule than the one that the plan names. `interference` is other traffic on a link.
    Raises `InputError` unless there is one load per stage, and a link for each hop in both directions.
    """
    if len(loads) != len(plan.stages):
        raise InputError(f"{len(loads)} loads for {len(plan.stages)} stages", hint="give one per stage")
    usual: dict[int, Schedule] = {}
    replicas = []
    for number in range(plan.dp):
        placed = [(s, load) for s, load in zip(plan.stages, loads, strict=True) if s.replica == number]
        stages = tuple(replace(load, cluster=stage.cluster, layers=stage.layers) for stage, load in placed)
        schedule = (schedules or {}).get(number)
        if schedule is None:
            if len(stages) not in usual:
                usual[len(stages)] = make_schedule(plan.schedule, len(stages), plan.micro_batches)
            schedule = usual[len(stages)]
        replicas.append(Replica(stages=stages, schedule=schedule))
    return Training(replicas=tuple(replicas), wires=_wires(plan, pool, interference or {}), seed=seed)


def _wires(plan: Plan, pool: Pool, interference: Mapping[Ends, Interference]) -> dict[Ends, Wire]:
    """Return the links among the plan's clusters as wires."""
    hops = {hop for replica in range(plan.dp) for hop in plan.hops(replica)}
    for a, b in sorted(hops | {(b, a) for a, b in hops}):
        if pool.link(a, b) is None:
            raise InputError(f"no link from {a} to {b}", hint="the plan crosses there: add it to the pool")
    used = set(plan.clusters)
    return {
        (link.source, link.target): wire_of(
            link, pool.link(link.target, link.source), interference.get((link.source, link.target))
        )
        for link in pool.links
        if {link.source, link.target} <= used
    }
