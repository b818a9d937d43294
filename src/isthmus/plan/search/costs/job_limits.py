"""`job_limits`: the search limits with the degrees that a job fixes."""

from __future__ import annotations

from dataclasses import replace

from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.workload import TrainingWorkload


def job_limits(limits: SearchLimits, job: Job, workload: TrainingWorkload) -> SearchLimits:
    """Return `limits` narrowed by the job's degrees, chips and overlap.

    A limit that is already set takes precedence. Raises `PlanError` for degrees that no pool can satisfy.
    """
    parallel, placement = job.parallel, job.placement
    found = replace(
        limits,
        tp=limits.tp or parallel.tp,
        pp=limits.pp or parallel.pp,
        dp=limits.dp or parallel.dp,
        cp=limits.cp or parallel.cp,
        ep=limits.ep or parallel.ep,
        max_chips=limits.max_chips or placement.max_chips,
        mixed_chips=limits.mixed_chips and placement.mixed_chips,
        overlap=limits.overlap and job.overlap,
    )
    reason = _unsatisfiable_reason(found, job, workload)
    if reason:
        raise PlanError(reason, hint="change the degree under `parallel`, or remove it")
    return found


def describe_degrees(limits: SearchLimits) -> str:
    """Return the fixed degrees as text: `tp 4, pp 6`."""
    fixed = {name: getattr(limits, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return ", ".join(f"{name} {value}" for name, value in fixed.items() if value)


def _unsatisfiable_reason(limits: SearchLimits, job: Job, workload: TrainingWorkload) -> str:
    """Return why no pool has a plan with these degrees, or an empty string."""
    layers, attention = workload.profile.num_layers, workload.profile.layers[0].attention.core
    experts = max(layer.feed_forward.num_experts for layer in workload.profile.layers)
    if limits.executable:
        for name in ("cp", "ep"):
            degree = getattr(limits, name) or 1
            if degree > 1:
                return f"parallel.{name} {degree}: the runtime splits a stage over chips by tp only"
        if limits.tp and attention and attention.num_kv_heads % limits.tp:
            heads = attention.num_kv_heads
            return f"parallel.tp {limits.tp} does not divide the {heads} key and value heads"
    if limits.pp and limits.pp > layers:
        return f"parallel.pp {limits.pp}: the model has {layers} layers"
    if limits.tp and attention and attention.num_heads % limits.tp:
        return f"parallel.tp {limits.tp} does not divide the {attention.num_heads} attention heads"
    if limits.ep and limits.ep > 1 and (not experts or experts % limits.ep):
        return f"parallel.ep {limits.ep} does not divide the {experts} experts of a layer"
    if limits.dp and limits.dp > job.training.global_batch_size:
        return f"parallel.dp {limits.dp}: a step has {job.training.global_batch_size} samples"
    return ""
