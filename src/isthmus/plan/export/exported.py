"""`Exported`: a plan in a framework's own words, and the shell text that starts it on every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.core.errors import InputError
from isthmus.core.job import Job, Training
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.plan.export.node_launches import Launch

MEASURED_STEPS = 50
"""Iterations of an export without a job: enough to measure the plan."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """`arguments` as the framework's parser takes them, `text` the file that starts them, and `notes`: what
    the framework does otherwise than the plan says.
    """

    framework: str
    plan: str
    text: str
    arguments: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as `isthmus export --json` prints it."""
        return {
            "framework": self.framework,
            "plan": self.plan,
            "arguments": list(self.arguments),
            "launches": [
                {**vars(one), "devices": list(one.devices), "stages": list(one.stages)}
                for one in self.launches
            ],
            "notes": list(self.notes),
            "text": self.text,
        }


def training_of(plan: Plan, job: Job | None) -> Training:
    """Return the job's hyper-parameters, or those of a short run that measures the plan.

    Raises `InputError` where the job asks for other batches than the plan was made for.
    """
    if job is None:
        return Training(
            steps=MEASURED_STEPS,
            sequence_length=plan.sequence_length,
            micro_batch_size=plan.micro_batch_size,
            global_batch_size=plan.samples,
            precision="fp32" if plan.precision == "fp32" else "bf16",
        )
    asked = job.training
    for what, of_plan, of_job in (
        ("sequence_length", plan.sequence_length, asked.sequence_length),
        ("samples a step", plan.samples, asked.global_batch_size),
        ("precision", plan.precision or asked.precision, asked.precision),
    ):
        if of_plan != of_job:
            raise InputError(
                f"{what} is {of_plan} in plan '{plan.id}' and {of_job} in job '{job.name}'",
                hint="plan again for this job, or leave --job out",
            )
    return asked


def model_folder(model: Model) -> str:
    """Return the folder of a model, where its tokenizer is, whether the folder or its file was named."""
    path = Path(model.path)
    return str(path.parent if path.suffix == ".json" else path)


def rank_map(launches: Sequence[Launch]) -> list[str]:
    """Return a line per launch: which node starts which ranks of which stages."""
    lines = []
    for one in launches:
        last = one.first_rank + len(one.devices) - 1
        stages = ", ".join(map(str, one.stages))
        lines.append(
            f"node rank {one.node_rank}: {one.where}, ranks {one.first_rank} to {last}, stages {stages}"
        )
    return lines
