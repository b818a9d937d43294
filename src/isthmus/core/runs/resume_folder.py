"""`inspect_resume`: what a job would resume from, and whether it can; the folder is only read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isthmus.core.errors import InputError
from isthmus.core.job import Job
from isthmus.core.runs.run_folder import newest_checkpoint_step, read_claim, refuse_forged
from isthmus.core.runs.run_identity import (
    FieldDifference,
    RunIdentity,
    differences,
    list_differences,
    shape_differences,
)


@dataclass(frozen=True)
class ResumeNote:
    """The checkpoint that a job resumes: its folder, step, job (None without a claim) and differing fields."""

    folder: Path
    step: int
    job: str | None
    differences: tuple[FieldDifference, ...]

    @property
    def text(self) -> str:
        """The note as one sentence."""
        source = f"job {self.job}, {self.folder}" if self.job else f"{self.folder}, which no job has claimed"
        found = "; ".join(map(str, self.differences))
        compared = (f"differs: {found}" if found else "same training fields") if self.job else "fields unknown"
        return f"resumes {source}, after step {self.step}; {compared}"


def inspect_resume(folder: Path, job: Job, here: RunIdentity) -> ResumeNote:
    """Return what the job with identity `here` resumes from `folder`.

    Raises `InputError` if the folder holds no complete checkpoint, if its claim is forged, if its model has other
    shapes, or if its newest checkpoint leaves no step to train.
    """
    refuse_forged(folder)
    step, there = newest_checkpoint_step(folder), read_claim(folder)
    if not step:
        raise InputError(
            f"resume: {folder} holds no complete checkpoint",
            hint="give the checkpoints.folder of a run, which contains step-... folders",
        )
    found = differences(there, here) if there else ()
    if there:
        refuse_other_shapes(there.job, found)
    refuse_finished(folder, step, job)
    return ResumeNote(folder, step, there.job if there else None, found)


def refuse_other_shapes(source: str, found: tuple[FieldDifference, ...]) -> None:
    """Raise `InputError` if the differences from the run of job `source` give the weights other shapes."""
    if wrong := shape_differences(found):
        raise InputError(
            f"resume: the model of job {source} has other weights: {list_differences(wrong)}",
            hint="resume with the same model, or start without `resume`",
        )


def refuse_finished(folder: Path, step: int, job: Job) -> None:
    """Raise `InputError` if a checkpoint after `step` steps leaves the job nothing to train."""
    if step >= job.training.steps:
        raise InputError(
            f"resume: the checkpoint in {folder} is after step {step}, this job ends at step {job.training.steps}",
            hint=f"nearest valid training.steps: {step + 1}",
        )
