"""`PackedSubmission`: a compact submission; a million of them fit into memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache

from isthmus.core.job import BYTES_TOKENIZER, Job
from isthmus.core.model import Model
from isthmus.core.views.api_views import Submission

_CACHE_SIZE = 4096
"""Number of unpacked jobs and models in the cache."""
MAX_CACHED_BYTES = 1 << 14
"""Largest packed job or model that the cache holds."""
_MODEL_TOKENIZER_MARK = b" "
"""Begins a job that was packed since the model's tokenizer is the default; JSON may begin with a space."""


@dataclass(frozen=True, slots=True)
class PackedSubmission:
    """A submission as JSON; jobs of the same model share its string."""

    job_json: bytes
    model_json: str
    key: str

    @classmethod
    def pack(cls, submission: Submission) -> PackedSubmission:
        """Return the packed form of a submission."""
        job = submission.job.model_dump_json(exclude_defaults=True, by_alias=True).encode()
        model = sys.intern(submission.model.model_dump_json(by_alias=True))
        return cls(_MODEL_TOKENIZER_MARK + job, model, submission.key)

    @property
    def num_bytes(self) -> int:
        """Size of the job and its model."""
        return len(self.job_json) + len(self.model_json)

    def unpack_job(self) -> Job:
        """Return the unpacked job."""
        return _parse_job(self.job_json)

    def unpack(self) -> Submission:
        """Return the unpacked submission."""
        return Submission.model_construct(
            job=_parse_job(self.job_json), model=_parse_model(self.model_json), key=self.key
        )


def _parse_job(text: bytes) -> Job:
    """Return the job; a large one is not kept in the cache, which would hold thousands of them."""
    return (_parse_cached_job if len(text) <= MAX_CACHED_BYTES else _parse_cached_job.__wrapped__)(text)


def _parse_model(text: str) -> Model:
    return (_parse_cached_model if len(text) <= MAX_CACHED_BYTES else _parse_cached_model.__wrapped__)(text)


@lru_cache(_CACHE_SIZE)
def _parse_cached_job(text: bytes) -> Job:
    """Return the job; one without the mark and without a tokenizer was packed when `bytes` was the default."""
    job = Job.model_validate_json(text)
    if text.startswith(_MODEL_TOKENIZER_MARK) or "tokenizer" in job.data.model_fields_set:
        return job
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": BYTES_TOKENIZER})})


@lru_cache(_CACHE_SIZE)
def _parse_cached_model(text: str) -> Model:
    return Model.model_validate_json(text)
