"""`Packed`: a compact submission; a million of them fit into memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

from isthmus.core.job import Job
from isthmus.core.messages.api_views import Submission
from isthmus.core.model import Model

_OPEN = 4096
"""Number of unpacked jobs and models in the cache."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A submission as JSON; jobs of the same model share its string."""

    job: bytes
    model: str
    key: str

    @classmethod
    def of(cls, submission: Submission) -> Packed:
        """Return the packed form of a submission."""
        job = submission.job.model_dump_json(exclude_defaults=True, by_alias=True).encode()
        return cls(job, sys.intern(submission.model.model_dump_json(by_alias=True)), submission.key)

    def __reduce__(self) -> tuple[type[Packed], tuple[bytes, str, str]]:
        """Pickle only the field values; a snapshot contains very many."""
        return Packed, (self.job, self.model, self.key)

    def wanted(self) -> Job:
        """Return the unpacked job."""
        return _job(self.job)

    def submission(self) -> Submission:
        """Return the unpacked submission."""
        return Submission.model_construct(job=_job(self.job), model=_model(self.model), key=self.key)


@lru_cache(_OPEN)
def _job(text: bytes) -> Job:
    return Job.model_validate_json(text)


@lru_cache(_OPEN)
def _model(text: str) -> Model:
    return Model.model_validate_json(text)
