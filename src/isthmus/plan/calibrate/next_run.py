"""`informative_runs`: the most informative next runs for a calibration, among changes of plans that were run.

A measurement of a plan whose predicted time has the relative variance v from its parameters, beside the scatter s of
runs, is expected to tell log2(1 + v / s^2) / 2 bits about the parameters: the mutual information of two normal
variables. Source: D. Lindley, "On a measure of the information provided by an experiment", Annals of Mathematical
Statistics 27 (1956).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from isthmus.core.plan import Plan, PlanPart, Stage
from isthmus.core.pool import Pool
from isthmus.core.runs.check_plan import plan_problems
from isthmus.plan.calibrate.measured_runs import PlannedRun
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.model_sizes import model_sizes
from isthmus.plan.time.predict import estimate_s, relative_uncertainty
from isthmus.plan.time.stage_costs import stage_costs


@dataclass(frozen=True, kw_only=True)
class CandidateRun:
    """A plan that could be run next, as a change of one that was run, with its expected information in bits."""

    like: str
    """Name of the run whose plan it changes."""
    change: str
    plan: Plan
    iteration_s: float
    bits: float


def informative_runs(runs: Sequence[PlannedRun], calibration: Calibration, most: int = 3) -> tuple[CandidateRun, ...]:
    """Return at most `most` changed plans that fit their pools, the most informative first."""
    found: dict[str, CandidateRun] = {}
    known = {_content(run.plan) for run in runs}
    for run in runs:
        for change, plan in _changed_plans(run.plan, run.pool):
            key = _content(plan)
            if key not in known and _runs_on(plan, run.pool, run.profile, calibration):
                known.add(key)
                found[key] = _candidate(run, change, plan, calibration)
    return tuple(sorted(found.values(), key=lambda one: (-one.bits, one.iteration_s))[:most])


def _content(plan: Plan) -> str:
    """Return what a plan runs: two plans of the same content are equally informative."""
    return plan.model_dump_json(exclude={"id", "predicted", "why"})


def _candidate(run: PlannedRun, change: str, plan: Plan, calibration: Calibration) -> CandidateRun:
    total = relative_uncertainty(plan, run.pool, run.profile, calibration) ** 2
    scatter = calibration.residual**2
    return CandidateRun(
        like=run.run.name,
        change=change,
        plan=plan,
        iteration_s=estimate_s(plan, run.pool, run.profile, calibration),
        bits=math.log2(1 + max(0.0, total - scatter) / scatter) / 2,
    )


def _changed_plans(plan: Plan, pool: Pool) -> Iterator[tuple[str, Plan]]:
    """Yield valid changes of the batch, the sequence, the tensor-parallel degree, recomputation and the place."""
    for change, update in (*_updates(plan), *_moves(plan, pool)):
        try:
            yield change, Plan.model_validate(plan.model_dump(exclude={"predicted"}) | update)
        except ValidationError:
            continue


def _updates(plan: Plan) -> Iterator[tuple[str, dict[str, object]]]:
    stages = [stage.model_dump() for stage in plan.stages]
    for factor in (0.5, 2, 4):
        size = int(plan.micro_batch_size * factor)
        yield f"micro_batch_size {size}", {"micro_batch_size": size}
    for factor in (0.5, 2):
        tokens = int(plan.sequence_length * factor)
        yield f"sequence_length {tokens}", {"sequence_length": tokens}
    for factor in (0.5, 2, 4):
        degrees = [int(stage.tp * factor) for stage in plan.stages]
        rows = [row | {"tp": tp, "sp": row["sp"] and tp > 1} for row, tp in zip(stages, degrees, strict=True)]
        yield f"tp {', '.join(map(str, sorted(set(degrees))))}", {"stages": rows}
    other = "none" if any(stage.recompute == "full" for stage in plan.stages) else "full"
    rows = [row | {"recompute": other, "recompute_layers": None} for row in stages]
    yield f"recompute {other}", {"stages": rows}


def _moves(plan: Plan, pool: Pool) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the stages of each node group moved to each other one: what its chips and links cost is learned there."""
    used = dict.fromkeys((stage.cluster, stage.node_group) for stage in plan.stages)
    places = [(cluster.name, group.name) for cluster in pool.clusters for group in cluster.node_groups]
    for old in used:
        for new in places:
            if new == old:
                continue
            rows = [
                stage.model_dump() | (dict(zip(_PLACE, new, strict=True)) if _place(stage) == old else {})
                for stage in plan.stages
            ]
            yield f"place {'/'.join(old)} to {'/'.join(new)}", {"stages": rows}


_PLACE = ("cluster", "node_group")


def _place(stage: Stage) -> tuple[str, str]:
    return stage.cluster, stage.node_group


def _runs_on(plan: Plan, pool: Pool, profile: ModelProfile, calibration: Calibration) -> bool:
    """Return whether a changed plan is valid and fits its pool's chips and their memory."""
    if any(True for _ in plan_problems(plan, model_sizes(profile), pool)):
        return False
    for part in (PlanPart.from_plan(plan, cluster) for cluster in plan.clusters):
        if any(taken > pool.cluster(part.cluster).group(name).num_chips for name, taken in part.chips.items()):
            return False
    costs = stage_costs(plan, pool, profile, calibration)
    return all(
        cost.load.static_bytes + min(len(costs) - place, plan.micro_batches) * cost.load.activation_bytes
        <= cost.memory_limit_bytes
        for place, cost in enumerate(costs)
    )
