"""Request and response bodies specific to the REST interface, and the documentation of its errors."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field, TypeAdapter

from isthmus.control.service.auth import UnknownCallerError
from isthmus.control.state.events import VictimNamed
from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.errors import AuthError, InputError, IsthmusError, RateLimitError
from isthmus.core.views.api_views import Submission

MAX_TEXT_CHARS = 256 << 10
"""Longest text of a job or of a model's configuration."""
MAX_BULK_JOBS = 1000
"""Largest number of jobs per request."""


class PlanChoice(FrozenModel):
    """The candidate plan chosen for a job."""

    plan: Name


class PreemptionRequest(FrozenModel):
    """The victims whose chips a job takes, as listed in `offer` of its view."""

    victims: Annotated[tuple[VictimNamed, ...], Field(min_length=1, max_length=MAX_BULK_JOBS), FailFast()]


class JobText(FrozenModel):
    """A job as its user writes it: the text of `job.yaml`, and of the model's `config.json` if it is a folder."""

    text: Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
    config: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] = ""


class BulkSubmission(FrozenModel):
    """Several jobs to submit in one batch."""

    submissions: Annotated[tuple[Submission, ...], Field(max_length=MAX_BULK_JOBS), FailFast()]


class ErrorBody(FrozenModel):
    """The body of every error response: class name in `isthmus.core.errors`, message, and what to do next."""

    error: str
    message: str
    hint: str | None = None


class SubmissionResult(FrozenModel):
    """The result of one submission of a batch: the job's id or the error."""

    id: Name | None = None
    error: ErrorBody | None = None


SUBMISSION_RESULTS = TypeAdapter(list[SubmissionResult])


def submission_result(outcome: str | IsthmusError) -> SubmissionResult:
    """Return the response for the outcome of one submission."""
    if isinstance(outcome, IsthmusError):
        fields = outcome.as_dict()
        return SubmissionResult(error=ErrorBody(error=fields["error"], message=fields["message"], hint=fields["hint"]))
    return SubmissionResult(id=outcome)


def error_responses(*more: type[IsthmusError]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses for `more` errors and for those that every endpoint may return."""
    found: dict[int | str, dict[str, Any]] = {}
    errors: tuple[type[IsthmusError], ...] = (*more, UnknownCallerError, AuthError, InputError, RateLimitError)
    for error in errors:
        name = "AuthError" if issubclass(error, AuthError) else error.__name__
        found[error.http_status] = {"model": ErrorBody, "description": name}
    found[413] = {"model": ErrorBody, "description": "InputError: the body is too large"}
    return found
