"""Losses of real workers under tp, pp and dp beside a plain loop of torch and transformers over the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from isthmus.core.job import Job
from isthmus.core.plan import Plan
from isthmus.data import open_job_data
from tests.train.small_models import NUM_LAYERS, save_model
from tests.train.worker_jobs import Workers, make_job, make_plan, run_job

STEPS = 6
MODELS = {"Llama": "llama", "Qwen3, tied": "qwen3-tied-window", "Mixtral": "mixtral"}
LAYOUTS = ("tp 2", "pp 2", "dp 2")


@dataclass(frozen=True)
class Equality:
    """The largest relative difference of a loss over the steps of one model under one layout."""

    model: str
    layout: str
    largest: float


def compare(folder: Path, models: tuple[str, ...] = tuple(MODELS), steps: int = STEPS) -> Iterator[Equality]:
    """Train each model under each layout and in a plain loop; yield how far their losses differ."""
    for model in models:
        job = prepared_job(folder / MODELS[model], MODELS[model], steps)
        expected = plain_losses(job)
        for layout in LAYOUTS:
            own = folder / f"{MODELS[model]}-{layout.replace(' ', '-')}"
            own.mkdir(parents=True)
            run = job.model_copy(
                update={
                    "output": str(own / "out"),
                    "checkpoints": job.checkpoints.model_copy(update={"folder": str(own)}),
                }
            )
            found = losses_of(run_job(own, run, plan_of(run, layout)))
            assert len(found) == steps, f"{len(found)} losses of {steps} steps"
            pairs = zip(found, expected, strict=True)
            yield Equality(model, layout, max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs))


def losses_of(workers: Workers) -> list[float]:
    """Return the loss of each step, from the ranks that report it."""
    metrics = [one for rank in range(len(workers.folders)) for one in workers.metrics(rank)]
    found = {one.step: one.values["loss"] for one in metrics if "loss" in one.values}
    return [found[step] for step in sorted(found)]


def prepared_job(folder: Path, variant: str, steps: int) -> Job:
    """Return a job that continues from saved weights, which the plain loop loads too."""
    training = {"clip_norm": 0.5, "min_learning_rate": 1e-4}
    job = make_job(folder, variant, steps=steps, task="continue", training=training)
    save_model(Path(job.model), variant, vocab_size=272, pad_token_id=None)
    return job


def plan_of(job: Job, layout: str) -> Plan:
    """Return the plan of two ranks for one of `LAYOUTS`."""
    if layout == "tp 2":
        return make_plan(job, [NUM_LAYERS], stage={"tp": 2})
    if layout == "pp 2":
        return make_plan(job, [1, NUM_LAYERS], "ab")
    training = job.training
    stages = [{"replica": r, "cluster": c, "node_group": "cpu", "layers": [0, NUM_LAYERS]} for r, c in enumerate("ab")]
    return Plan.model_validate(
        {
            "id": "dp", "dp": 2, "stages": stages, "sequence_length": training.sequence_length,
            "micro_batches": training.global_batch_size // training.micro_batch_size // 2,
            "micro_batch_size": training.micro_batch_size,
        }
    )  # fmt: skip


def plain_losses(job: Job) -> list[float]:
    """Return the losses of `torch.optim.AdamW` over the whole batch, with warm-up, cosine decay and clipping."""
    training, data = job.training, open_job_data(job)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(job.model, dtype=torch.float32, attn_implementation="eager")
    weights = list(model.parameters())
    groups = [
        {"params": [one for one in weights if one.dim() > 1], "weight_decay": training.weight_decay},
        {"params": [one for one in weights if one.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(training.beta1, training.beta2), eps=training.epsilon)
    found = []
    for step in range(training.steps):
        batch = data.train_batch(step * training.global_batch_size, training.global_batch_size)
        logits = model(input_ids=batch.input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, training.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(job, step)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def rate(job: Job, step: int) -> float:
    """Return the learning rate of `step`: linear warm-up, then a half cosine down to the minimum."""
    training = job.training
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / (training.steps - training.warmup_steps)
    low = training.min_learning_rate
    return low + (training.learning_rate - low) * (1 + math.cos(math.pi * done)) / 2
