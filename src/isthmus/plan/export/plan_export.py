"""`PlanExport`: a plan as a framework's configuration, and the file that launches it on every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.core.errors import InputError
from isthmus.core.job import Job, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.plan.export.node_launches import NodeLaunch

MEASUREMENT_STEPS = 50
"""Number of iterations of an export without a job, enough to measure the plan."""


@dataclass(frozen=True, kw_only=True)
class PlanExport:
    """A plan, exported to a framework."""

    framework: str
    plan: str
    """Id of the plan."""
    text: str
    """The file that launches it."""
    arguments: tuple[str, ...] = ()
    """Arguments for the framework's parser."""
    launches: tuple[NodeLaunch, ...] = ()
    notes: tuple[str, ...] = ()
    """Differences between the framework's behaviour and the plan."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as `isthmus export --json` prints it."""
        return {
            "framework": self.framework,
            "plan": self.plan,
            "arguments": list(self.arguments),
            "launches": [
                {**vars(one), "devices": list(one.devices), "stages": list(one.stages)} for one in self.launches
            ],
            "notes": list(self.notes),
            "text": self.text,
        }


def training_config(plan: Plan, job: Job | None) -> TrainingConfig:
    """Return the job's hyperparameters, or those of a short run that measures the plan.

    Raises `InputError` if batch, sequence length or precision differ between job and plan.
    """
    if job is None:
        return TrainingConfig(
            steps=MEASUREMENT_STEPS,
            sequence_length=plan.sequence_length,
            micro_batch_size=plan.micro_batch_size,
            global_batch_size=plan.num_samples,
            precision="fp32" if plan.precision == "fp32" else "bf16",
        )
    asked = job.training
    for what, of_plan, of_job in (
        ("sequence_length", plan.sequence_length, asked.sequence_length),
        ("samples per step", plan.num_samples, asked.global_batch_size),
        ("precision", plan.precision or asked.precision, asked.precision),
    ):
        if of_plan != of_job:
            raise InputError(
                f"{what} is {of_plan} in plan '{plan.id}' and {of_job} in job '{job.name}'",
                hint="plan again for this job, or omit --job",
            )
    return asked


def model_folder(model: Model) -> str:
    """Return the folder of a model, which has its tokenizer, from the path of the folder or its file."""
    path = Path(model.path)
    return str(path.parent if path.suffix == ".json" else path)


def rank_map(launches: Sequence[NodeLaunch]) -> list[str]:
    """Return a line per launch with its node, ranks and stages."""
    lines = []
    for one in launches:
        last = one.first_rank + len(one.devices) - 1
        stages = ", ".join(map(str, one.stages))
        lines.append(f"node rank {one.node_rank}: {one.node_name}, ranks {one.first_rank} to {last}, stages {stages}")
    return lines
