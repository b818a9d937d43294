"""`make_job_filter`: the filter of a list of jobs from what a user gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from pydantic import ValidationError

from isthmus.core.errors import InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.views.api_views import JobFilter, JobState


def make_job_filter(
    *,
    state: Sequence[str] = (),
    name: str | None = None,
    user: str | None = None,
    owner: str | None = None,
    since_s: float | None = None,
) -> JobFilter:
    """Return the filter; raise `InputError` for an unknown state, a malformed name or a negative time."""
    fields = {"state": tuple(state), "name": name, "user": user, "owner": owner, "since_s": since_s}
    try:
        return JobFilter.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field, value = first["loc"][0], str(first["input"])[:80]
        if field == "state":
            hint = suggest_name(value, get_args(JobState))
        elif field == "since_s":
            hint = "give seconds since the epoch, 0 or more"
        else:
            hint = "a name has at most 63 letters, digits, '.', '_' and '-'"
        raise InputError(f"{field} '{value}' is not valid", hint=hint) from error
