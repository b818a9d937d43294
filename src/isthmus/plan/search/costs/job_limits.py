"""`job_limits`: the search limits with the degrees that a job fixes."""

from __future__ import annotations

from collections.abc import Iterator
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
    for reason, name, nearest in _impossible_degrees(found, job, workload):
        raise PlanError(reason, hint=f"nearest valid: parallel.{name} {nearest}; or remove it")
    return found


def describe_degrees(limits: SearchLimits) -> str:
    """Return the fixed degrees as text: `tp 4, pp 6`."""
    fixed = {name: getattr(limits, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return ", ".join(f"{name} {value}" for name, value in fixed.items() if value)


def _impossible_degrees(limits: SearchLimits, job: Job, workload: TrainingWorkload) -> Iterator[tuple[str, str, int]]:
    """Yield why no pool has a plan with these degrees: the reason, the degree's name, its nearest valid value."""
    layers, attention = workload.profile.num_layers, workload.profile.layers[0].attention.core
    experts = max(layer.feed_forward.num_experts for layer in workload.profile.layers)
    samples, tp, ep = job.training.global_batch_size, limits.tp or 1, limits.ep or 1
    if limits.executable:
        for name in ("cp", "ep"):
            degree = getattr(limits, name) or 1
            if degree > 1:
                yield f"parallel.{name} {degree}: the runtime splits a stage over chips by tp only", name, 1
        if attention and attention.num_kv_heads % tp:
            heads = attention.num_kv_heads
            yield f"parallel.tp {tp} does not divide the {heads} key and value heads", "tp", divisor_below(heads, tp)
    if limits.pp and limits.pp > layers:
        yield f"parallel.pp {limits.pp}: the model has {layers} layers", "pp", layers
    if attention and attention.num_heads % tp:
        heads = attention.num_heads
        yield f"parallel.tp {tp} does not divide the {heads} attention heads", "tp", divisor_below(heads, tp)
    if ep > 1 and (not experts or experts % ep):
        nearest = divisor_below(experts, ep) if experts else 1
        yield f"parallel.ep {ep} does not divide the {experts} experts of a layer", "ep", nearest
    if limits.dp and limits.dp > samples:
        yield f"parallel.dp {limits.dp}: a step has {samples} samples", "dp", samples


def divisor_below(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return next(one for one in range(min(number, most), 0, -1) if number % one == 0)
