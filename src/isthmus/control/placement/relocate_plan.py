"""`relocate_plan`: the same stages of a plan at other clusters, on chips of the same kind, with new timing."""

from __future__ import annotations

import hashlib
import itertools

from isthmus.control.placement.place_plan import PlanPlacement
from isthmus.control.placement.resources.free_resources import FreeResources
from isthmus.control.placement.resources.plan_requirement import PlanRequirement
from isthmus.core.job import Job
from isthmus.core.plan import Plan, Prediction, Stage
from isthmus.core.pool import Pool
from isthmus.plan import ModelProfile, TrainingWorkload, calibration_for, mfu_fraction, score_plan

MAX_SEARCHED_CELLS = 256
"""Up to this many (stage, micro-batch) pairs the warm-up is searched again by simulation; a larger plan keeps its own,
which fits the same chips.
"""


def relocate_plan(
    plan: Plan,
    placement: PlanPlacement,
    plan_requirement: PlanRequirement,
    resources: FreeResources,
    job: Job,
    profile: ModelProfile,
    pool: Pool,
) -> Plan:
    """Return `plan` at the clusters of `placement`, with the simulator's prediction.

    Raises `ConflictError` if the nodes are not free, `PlanError` if the links do not admit the plan.
    """
    left, pipelines = resources, dict[int, list[Stage]]()
    for number in plan_requirement.largest_first:
        kind, candidate = plan_requirement.groups[number], placement.candidates[number]
        left, taken = left.after_placing(kind.requirement, candidate.ranges, network=False)
        where = [one.cluster for one in candidate.ranges for _ in range(one.first, one.last)]
        groups = [list(itertools.chain(*([name] * count for name, count in row))) for row in taken]
        for one, replica in enumerate(kind.replicas):
            pipelines[replica] = [
                stage.model_copy(update={"cluster": where[place], "node_group": groups[place][one]})
                for place, stage in enumerate(plan.pipeline(replica))
            ]
    stages = [stage for replica in range(plan.dp) for stage in pipelines[replica]]
    text = ";".join(stage.model_dump_json() for stage in stages) + f"|{plan.id}"
    moved_plan = plan.model_copy(
        update={
            "id": "plan-" + hashlib.sha256(text.encode()).hexdigest()[:8],
            "stages": tuple(stages),
            "warm_up": () if len(stages) * plan.micro_batches <= MAX_SEARCHED_CELLS else plan.warm_up,
            "predicted": None,
        }
    )
    timed = _with_prediction(Plan.model_validate(moved_plan.model_dump()), plan, job, profile, pool)
    return timed.model_copy(update={"why": f"{plan.id} at other clusters: {placement.why}"})


def _with_prediction(moved: Plan, plan: Plan, job: Job, profile: ModelProfile, pool: Pool) -> Plan:
    """Return `moved` with the prediction of `plan`, updated for its place: time, cost, WAN traffic."""
    task = TrainingWorkload(
        profile=profile,
        sequence_length=job.training.sequence_length,
        precision=job.training.precision,
        calibration=calibration_for(pool),
    )
    run, old = (
        score_plan(moved, pool, task),
        plan.predicted or Prediction(iteration_s=0, tgs_tokens_per_card_s=0, samples_per_s=0, peak_memory_bytes=()),
    )
    groups = [(s.num_chips, pool.node_group(s.cluster, s.node_group)) for s in moved.stages]
    per_s = sum(chips * group.price_per_chip_hour / 3600 for chips, group in groups)
    num_cards = sum(chips / pool.chip(group).chips_per_card for chips, group in groups)
    precision_bytes = 4 if job.training.precision == "fp32" else 2
    update = {
        "iteration_s": run.iteration_s,
        "tgs_tokens_per_card_s": moved.num_samples * moved.sequence_length / run.iteration_s / num_cards,
        "samples_per_s": moved.num_samples / run.iteration_s,
        "cost_per_iteration": per_s * run.iteration_s,
        "mfu_fraction": mfu_fraction(moved, pool, profile, job.training.precision, run.iteration_s),
        "wan_gbps": tuple(
            moved.micro_batches_of(replica)
            * profile.boundary_bytes(moved.micro_batch_size_of(replica) * moved.sequence_length, precision_bytes)
            * 8
            / 1e9
            / run.iteration_s
            for replica in range(moved.dp)
            for _ in moved.hops(replica)
        ),
    }
    return moved.model_copy(update={"predicted": old.model_copy(update=update)})
