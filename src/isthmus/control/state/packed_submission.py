"""`Packed`: a submission as the queue keeps it, so that a million of them fit into memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

from isthmus.core.job import Job
from isthmus.core.messages.api_views import Submission
from isthmus.core.model import Model

_OPEN = 4096
"""Submissions kept unpacked: those of the jobs that something happens to."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The JSON of a job and of its model; jobs of one model share it."""

    job: bytes
    model: str
    key: str

    @classmethod
    def of(cls, submission: Submission) -> Packed:
        """Return the short form of a submission."""
        job = submission.job.model_dump_json(exclude_defaults=True, by_alias=True).encode()
        return cls(job, sys.intern(submission.model.model_dump_json(by_alias=True)), submission.key)

    def __reduce__(self) -> tuple[type[Packed], tuple[bytes, str, str]]:
        """Be pickled as what it is made of: a snapshot holds very many."""
        return Packed, (self.job, self.model, self.key)

    def wanted(self) -> Job:
        """Return the job that was packed."""
        return _job(self.job)

    def submission(self) -> Submission:
        """Return what was packed."""
        return Submission.model_construct(job=_job(self.job), model=_model(self.model), key=self.key)


@lru_cache(_OPEN)
def _job(text: bytes) -> Job:
    return Job.model_validate_json(text)


@lru_cache(_OPEN)
def _model(text: str) -> Model:
    return Model.model_validate_json(text)
