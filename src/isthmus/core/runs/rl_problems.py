"""`rl_problems`: fields of a job with `task: rl` that are valid each but not together."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.core.job import Job
from isthmus.core.runs.field_problem import FieldProblem


def rl_problems(job: Job) -> Iterator[FieldProblem]:
    """Yield the problems of data, batch and sequence sizes, and of fields that task rl does not use."""
    if job.rl is None:
        if job.data.format == "prompts":
            hint = "nearest valid value: jsonl; or task: rl"
            yield FieldProblem("data.format", "prompts", f"format prompts for task {job.task}", hint)
        for name in ("train", "rollouts"):
            if given := getattr(job.placement, name):
                hint = "nearest valid: placement.clusters"
                yield FieldProblem(f"placement.{name}", list(given), f"task {job.task} has no rollouts", hint)
        return
    training, rl = job.training, job.rl
    if job.data.format != "prompts":
        yield FieldProblem(
            "data.format", job.data.format, f"format {job.data.format} for task rl", "nearest valid value: prompts"
        )
    if job.data.chat_template is not None:
        yield FieldProblem(
            "data.chat_template", job.data.chat_template, "task rl takes prompts as they are",
            "remove it, and render the prompts",
        )  # fmt: skip
    if training.global_batch_size % rl.group:
        nearest = max(round(training.global_batch_size / rl.group), 1) * rl.group
        yield FieldProblem(
            "training.global_batch_size", training.global_batch_size,
            f"{training.global_batch_size} samples are not whole groups of {rl.group}",
            f"nearest valid value: {nearest}",
        )  # fmt: skip
    needed = rl.max_prompt_tokens + rl.max_response_tokens
    if training.sequence_length < needed:
        yield FieldProblem(
            "training.sequence_length", training.sequence_length,
            f"{training.sequence_length} tokens do not hold a prompt of {rl.max_prompt_tokens} and a response of "
            f"{rl.max_response_tokens}",
            f"nearest valid value: {needed}",
        )  # fmt: skip
    yield from _rollout_problems(job)
    if training.local_steps > 1:
        yield FieldProblem(
            "training.local_steps", training.local_steps, "replicas that train apart have no common version to decode",
            "nearest valid value: 1",
        )  # fmt: skip
    if job.compute == "virtual":
        yield FieldProblem("compute", "virtual", "task rl decodes and trains", "nearest valid value: real")


def _rollout_problems(job: Job) -> Iterator[FieldProblem]:
    """Yield the problems of the clusters that decode."""
    names = job.placement.rollouts
    if twice := next((one for at, one in enumerate(names) if one in names[:at]), None):
        hint = f"nearest valid: {list(dict.fromkeys(names))}"
        yield FieldProblem("placement.rollouts", list(names), f"{twice} is named twice", hint)
    if names and job.placement.least_rollouts > len(names):
        least = job.placement.least_rollouts
        text = f"{least} clusters are to decode at least, placement.rollouts names {len(names)}"
        yield FieldProblem("placement.least_rollouts", least, text, f"nearest valid value: {len(names)}")
