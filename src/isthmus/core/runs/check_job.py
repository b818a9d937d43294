"""Fields of a job that are valid each but not together; each problem names the nearest valid value.

The checks run where a job enters (a job file, a submission), so stored jobs of earlier releases still load.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from isthmus.core.base_model import MAX_INTEGER
from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.model import MAX_DIMENSION, Model
from isthmus.core.runs.check_paths import path_problems
from isthmus.core.runs.field_problem import FieldProblem, too_large
from isthmus.core.runs.rl_problems import rl_problems

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def check_job(job: Job, model: Model | None = None) -> None:
    """Raise `InputError` for the first problem of the job, and of the job with its model if given."""
    for problem in (*job_problems(job), *(model_problems(job, model) if model else ())):
        raise InputError(f"{problem.field}: {problem.message}", hint=problem.hint)


def job_problems(job: Job) -> Iterator[FieldProblem]:
    """Yield the problems that need no model: training fields, evaluation, data format, resuming, paths."""
    if job.engine == "command":
        return
    yield from _training_problems(job)
    if job.task != "finetune" and job.data.format == "chat":
        yield FieldProblem(
            "data.format", "chat", f"format chat for task {job.task}", "nearest valid value: jsonl; or task: finetune"
        )
    if job.task == "finetune" and job.data.format not in ("auto", "chat"):
        yield FieldProblem(
            "data.format",
            job.data.format,
            f"format {job.data.format} for task finetune",
            "nearest valid value: chat; or task: continue",
        )
    yield from rl_problems(job)
    if job.resume is not None and job.compute == "virtual":
        yield FieldProblem("resume", job.resume, "compute: virtual has no checkpoints", "remove it, or compute: real")
    if job.output_site is not None and job.compute == "virtual":
        yield FieldProblem(
            "output_site", job.output_site, "compute: virtual writes no model", "remove it, or compute: real"
        )
    if job.output_site is not None and job.placement.clusters and job.output_site not in job.placement.clusters:
        yield FieldProblem(
            "output_site",
            job.output_site,
            f"{job.output_site} is not among placement.clusters, and must take part to get the model",
            f"nearest valid value: {_nearest(job.output_site, job.placement.clusters)}",
        )
    yield from path_problems(job)


def model_problems(job: Job, model: Model) -> Iterator[FieldProblem]:
    """Yield the problems of the job with its model: more tokens than positions, a degree above the experts.

    Routing that is to be replayed needs experts.
    """
    tokens, most, ep = job.training.sequence_length, max_positions(model), job.parallel.ep
    if most is not None and tokens > most:
        yield too_large("training.sequence_length", tokens, f"the positions of {model.path}", most)
    if ep is not None and ep > max(1, (experts := num_experts(model))):
        limit = f"the experts of {model.path}" if experts else f"1: {model.path} has no experts"
        yield too_large("parallel.ep", ep, limit, max(1, experts))
    if job.rl is not None and job.rl.replay_routing and not num_experts(model):
        hint = "nearest valid value: false"
        yield FieldProblem("rl.replay_routing", True, f"{model.path} has no experts", hint)


def max_positions(model: Model) -> int | None:
    """Return the longest sequence that the model's positions cover, scaling included; None if it has no limit."""
    most = _positive_int(model.config.get("max_position_embeddings"))
    scaling = model.config.get("rope_scaling") or model.config.get("rope_parameters")
    if most is None or not isinstance(scaling, dict):
        return most
    factor, original = scaling.get("factor"), _positive_int(scaling.get("original_max_position_embeddings"))
    if not isinstance(factor, int | float) or not 1 < factor <= MAX_DIMENSION:
        return most
    return max(most, int(factor * (original or most)))


def num_experts(model: Model) -> int:
    """Return the experts of a layer of the model; 0 for a dense model."""
    return max((_positive_int(model.config.get(name)) or 0 for name in _EXPERT_COUNTS), default=0)


def _training_problems(job: Job) -> Iterator[FieldProblem]:
    training, prefix = job.training, "training."
    peak, steps = training.learning_rate, training.steps
    if training.min_learning_rate > peak:
        yield too_large(f"{prefix}min_learning_rate", training.min_learning_rate, "training.learning_rate", peak)
    for name in ("warmup_steps", "local_steps", "evaluate_every"):
        if (value := getattr(training, name)) > steps:
            yield too_large(f"{prefix}{name}", value, "training.steps", steps)
    for name in ("beta1", "beta2"):
        if getattr(training, name) == 1:
            hint = "nearest valid value: 0.9999"
            yield FieldProblem(f"{prefix}{name}", 1.0, "1 never forgets a gradient: the update divides by 0", hint)
    if training.evaluate_every and not job.data.validation_fraction:
        hint = "set data.validation_fraction to 0.01, or training.evaluate_every to 0"
        yield FieldProblem(f"{prefix}evaluate_every", training.evaluate_every, "no data is held out", hint)


def _nearest(word: str, words: Sequence[str]) -> str:
    return difflib.get_close_matches(word, words, 1, 0)[0]


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_INTEGER else None
