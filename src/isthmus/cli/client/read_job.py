"""`read_job`: a job file as it is submitted, with the model that it names and the tokenizer that is pinned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isthmus.core.files.model_tokenizer import check_vocabulary, describe_tokenizer, pin_tokenizer
from isthmus.core.files.user_files import load_job
from isthmus.core.job import Job
from isthmus.core.model import Model, load_model


@dataclass(frozen=True, kw_only=True)
class ReadJob:
    """A job that is ready to be planned or submitted."""

    job: Job
    model: Model
    notes: tuple[str, ...]
    """What was chosen for the user: lines to show."""


def read_job(file: Path) -> ReadJob:
    """Read `file` and its model; pin the tokenizer.

    Raises `FileError`, `ModelError`, or `DataError` if the tokenizer has more ids than the model's vocabulary.
    """
    asked = load_job(file)
    model = load_model(asked.model)
    job = pin_tokenizer(asked)
    check_vocabulary(job, model)
    virtual = job.compute == "virtual"
    return ReadJob(job=job, model=model, notes=() if virtual else (describe_tokenizer(asked, job),))
