"""`overfull_stages` and `fitting_changes`: where a given plan exceeds its chips' memory, and what makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.core.errors import IsthmusError
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.memory.memory_limit import device_bytes, memory_limit_bytes
from isthmus.plan.memory.plan_stage_memory import stage_degrees
from isthmus.plan.profile.chosen_stack import chosen_stack
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.predict import PlanForecast, predict


@dataclass(frozen=True, kw_only=True)
class OverfullStage:
    """A stage (index into `Plan.stages`) whose peak exceeds what its allocator may reserve on the chip."""

    stage: int
    peak_bytes: float
    limit_bytes: float
    chip_bytes: float


def overfull_stages(plan: Plan, pool: Pool, forecast: PlanForecast) -> tuple[OverfullStage, ...]:
    """Return the stages of `plan` that do not fit their chips on `pool`, in plan order."""
    found = []
    for index, (stage, run) in enumerate(zip(plan.stages, _in_plan_order(plan, forecast), strict=True)):
        stack = chosen_stack(plan)
        chip_bytes = device_bytes(pool.chip(pool.node_group(stage.cluster, stage.node_group)))
        limit_bytes = memory_limit_bytes(chip_bytes, stack, stage_degrees(plan, stage))
        if run > limit_bytes:
            found.append(OverfullStage(stage=index, peak_bytes=run, limit_bytes=limit_bytes, chip_bytes=chip_bytes))
    return tuple(found)


def fitting_changes(plan: Plan, pool: Pool, model: Model | ModelProfile) -> tuple[tuple[str, float], ...]:
    """Return changes of a plan that does not fit, each with its step time in s; all were simulated and fit."""
    profile = profile_model(model) if isinstance(model, Model) else model
    found = []
    for text, changed in _changed_plans(plan):
        try:
            forecast = predict(changed, pool, profile)
        except IsthmusError:  # the schedule or the model does not allow the change
            continue
        if not overfull_stages(changed, pool, forecast):
            found.append((text, forecast.iteration_s))
    return tuple(found)


def _changed_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield each change as text, with the changed plan."""
    recomputed = [stage.model_dump() | {"recompute": "full", "recompute_layers": None} for stage in plan.stages]
    other = "bf16" if plan.precision in ("fp32", "tf32") else "fp32"
    single: list[tuple[str, dict[str, object]]] = []
    if any(stage.recompute != "full" or stage.recompute_layers is not None for stage in plan.stages):
        single.append(("recompute: full in every stage", {"stages": recomputed}))
    if not plan.optimizer_on_host:
        single.append(("optimizer_on_host: true", {"optimizer_on_host": True}))
    if plan.dp > 1 and plan.zero == 0:
        single.append(("zero: 1", {"zero": 1}))
    single.append((f"precision: {other}", {"precision": other}))
    if plan.micro_batch_size % 2 == 0 and not plan.replica_micro_batches and not plan.replica_micro_batch_sizes:
        halved = {"micro_batch_size": plan.micro_batch_size // 2, "micro_batches": plan.micro_batches * 2}
        single.append((f"micro_batch_size: {halved['micro_batch_size']}", dict(halved)))
    if len(single) > 1:
        single.append((" and ".join(text for text, _ in single[:2]), single[0][1] | single[1][1]))
    for text, update in single:
        yield text, Plan.model_validate(plan.model_dump() | update)


def _in_plan_order(plan: Plan, forecast: PlanForecast) -> list[float]:
    """Return the peak bytes by stage in the order of `plan.stages`; the simulation lists them by replica."""
    peaks = iter(run.peak_memory_bytes for run in forecast.result.stages)
    by_replica = {replica: [next(peaks) for _ in plan.pipeline(replica)] for replica in range(plan.dp)}
    places = dict.fromkeys(by_replica, 0)
    found = []
    for stage in plan.stages:
        found.append(by_replica[stage.replica][places[stage.replica]])
        places[stage.replica] += 1
    return found
