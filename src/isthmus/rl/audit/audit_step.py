"""`audit_step`: recomputes the trained samples of a step after the run, from the checkpoints that it kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isthmus.core.errors import InputError, IsthmusError
from isthmus.core.job import Job
from isthmus.rl.audit.judge_sample import BF16_BOUNDS, FP32_BOUNDS
from isthmus.rl.audit.stored_weights import StoredWeights
from isthmus.rl.audit.trajectory_auditor import SampleClaim, TrajectoryAuditor
from isthmus.rl.kept.kept_samples import KeptSample, KeptSamples
from isthmus.rl.rollout.open_engine import MAX_ROWS, open_engine, sampling_of
from isthmus.rl.rollout.trajectory import Trajectory
from isthmus.train.model.transformers_model import read_transformers_config

Verdict = tuple[str, str]
"""An owner, and how its tokens differ: "" if they do not."""


def audit_step(job: Job, ledger_folder: Path, step: int, most: int | None = None) -> dict[str, Any]:
    """Return what recomputing up to `most` samples of training step `step` found (None: all).

    Of the answer, `differing` names samples, owners and problems, `owners` counts by owner of what was recomputed, and
    `not_recomputed` counts by reason. Samples are recomputed on the CPU, some hundred at a time, with two versions of
    the weights in memory.

    Raises `NotFoundError` for a step of which no tokens are kept, `InputError` for damaged files.
    """
    if job.rl is None:
        raise InputError(f"job {job.name} has task {job.task}", hint="only jobs with task: rl have samples")
    kept = KeptSamples(ledger_folder).read(step)
    weights = StoredWeights(job, kept.names)
    vocab_size = int(read_transformers_config(job.model).get_text_config().vocab_size)
    reasons, verdicts = Counter[str](), dict[tuple[int, ...], Verdict]()
    if kept.num_left_out:
        reasons["its tokens are not kept: the step has too many"] = kept.num_left_out
    todo = list[KeptSample]()
    for one in sorted(kept.samples, key=lambda one: sorted(one.versions)):
        if problem := _problem(one, weights):
            reasons[problem] += 1
        elif most is not None and len(todo) >= most:
            reasons["not asked for"] += 1
        elif forged := _beyond_vocabulary(one, vocab_size):
            verdicts[one.key] = forged
        else:
            todo.append(one)
    for start in range(0, len(todo), MAX_ROWS):
        _audit(job, weights, todo[start : start + MAX_ROWS], verdicts, reasons)
    owners = {owner: {"recomputed": 0, "differing": 0} for owner, _ in verdicts.values()}
    for owner, problem in verdicts.values():
        owners[owner]["recomputed"] += 1
        owners[owner]["differing"] += bool(problem)
    return {
        "samples": len(kept.samples) + kept.num_left_out,
        "recomputed": len(verdicts),
        "differing": [
            {"sample": list(key), "owner": owner, "problem": problem}
            for key, (owner, problem) in sorted(verdicts.items())
            if problem
        ],
        "owners": owners,
        "not_recomputed": [{"reason": reason, "samples": count} for reason, count in reasons.items()],
    }


def _problem(one: KeptSample, weights: StoredWeights) -> str:
    """Return why a sample cannot be recomputed, or ""."""
    for version in sorted(one.versions):
        if problem := weights.problem(version):
            return problem
    return "" if one.tokens else "it has no tokens"


def _beyond_vocabulary(one: KeptSample, vocab_size: int) -> Verdict | None:
    """Return who gave the first token that the model does not have."""
    if any(token >= vocab_size for token in one.prompt_tokens):
        raise InputError(f"the prompt of sample {one.key} has a token of another model", hint="name the job's model")
    at = next((place for place, token in enumerate(one.tokens) if token >= vocab_size), None)
    if at is None:
        return None
    owner = next(piece.owner for piece in one.ranges if piece.start <= at < piece.end)
    return owner, f"token {at} is {one.tokens[at]}, in a vocabulary of {vocab_size}"


def _audit(
    job: Job, weights: StoredWeights, batch: Sequence[KeptSample], verdicts: dict[tuple[int, ...], Verdict],
    reasons: Counter[str],
) -> None:  # fmt: skip
    """Recompute samples, whose weights are here, with an engine of their own."""
    auditor = TrajectoryAuditor(
        lambda version, tensors, draw: open_engine(job, version, tensors, torch.device("cpu"), draw=draw),
        weights, sampling_of(job, frozenset()), job.rl.on_update if job.rl is not None else "keep",
        FP32_BOUNDS if job.training.precision == "fp32" else BF16_BOUNDS,
    )  # fmt: skip
    claims = [
        SampleClaim(
            sample=one.record, prompt_tokens=one.prompt_tokens,
            trajectory=Trajectory(tokens=list(one.tokens), log_probabilities=list(one.log_probabilities)),
        )
        for one in batch
    ]  # fmt: skip
    try:
        found = auditor.audit_all(claims)
    except IsthmusError as error:
        reasons[f"the engine cannot compute it: {error.message}"] += len(batch)
        return
    for one, verdict in zip(batch, found, strict=True):
        if verdict is None:
            reasons["the weights give no numbers"] += 1
        else:
            verdicts[one.key] = verdict
