"""`job_limits`: the search limits with the degrees that a job fixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.runs.check_plan import divisor_below, expert_problem, head_problem
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.time.model_sizes import model_sizes


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
    for reason, nearest in _impossible_degrees(found, job, workload):
        raise PlanError(f"parallel.{reason}", hint=f"nearest valid: parallel.{nearest}; or remove it")
    return found


def describe_degrees(limits: SearchLimits) -> str:
    """Return the fixed degrees as text: `tp 4, pp 6`."""
    fixed = {name: getattr(limits, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return ", ".join(f"{name} {value}" for name, value in fixed.items() if value)


def _impossible_degrees(limits: SearchLimits, job: Job, workload: TrainingWorkload) -> Iterator[tuple[str, str]]:
    """Yield why no pool has a plan with these degrees: the reason, and the nearest valid degree."""
    sizes, samples = model_sizes(workload.profile), job.training.global_batch_size
    tp, ep = limits.tp or 1, limits.ep or 1
    if limits.executable:
        tokens, cp = job.training.sequence_length, limits.cp or 1
        if tokens % cp:
            yield f"cp {cp} does not divide the {tokens} tokens of a sequence", f"cp {divisor_below(tokens, cp)}"
        heads = sizes.num_kv_heads
        if heads and heads % tp:
            yield f"tp {tp} does not divide the {heads} key and value heads", f"tp {divisor_below(heads, tp)}"
    if limits.pp and limits.pp > sizes.num_layers:
        yield f"pp {limits.pp}: the model has {sizes.num_layers} layers", f"pp {sizes.num_layers}"
    for problem in (*head_problem("tp", tp, sizes), *expert_problem("ep", ep, sizes)):
        yield problem.message, problem.hint.removeprefix("nearest valid: ")
    if limits.dp and limits.dp > samples:
        yield f"dp {limits.dp}: a step has {samples} samples", f"dp {samples}"
