"""Bodies that only the REST interface has, and how its errors are documented."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from isthmus.control.service.auth import UnknownCallerError
from isthmus.control.state.events import VictimNamed
from isthmus.core.base import Frozen, Name
from isthmus.core.errors import AuthError, InputError, IsthmusError
from isthmus.core.messages.api_views import Submission

LARGEST_BULK = 1000
"""Most jobs submitted by one request."""


class Choice(Frozen):
    """The candidate plan that a job shall run by."""

    plan: Name


class Agreement(Frozen):
    """The victims whose chips a job shall have: those that `offer` of its view names."""

    victims: Annotated[tuple[VictimNamed, ...], Field(min_length=1, max_length=LARGEST_BULK)]


class Bulk(Frozen):
    """Many jobs to be taken in, with one flush for all."""

    submissions: Annotated[tuple[Submission, ...], Field(max_length=LARGEST_BULK)]


class ErrorBody(Frozen):
    """How every error is answered: its name in the tree of `isthmus.core.errors`, and what to do next."""

    error: str
    message: str
    hint: str | None = None


class Submitted(Frozen):
    """What became of one of many submissions: its job's id, or why it was refused."""

    id: Name | None = None
    error: ErrorBody | None = None


OUTCOMES = TypeAdapter(list[Submitted])


def submitted(outcome: str | IsthmusError) -> Submitted:
    """Return how the outcome of one of many submissions is told."""
    if isinstance(outcome, IsthmusError):
        told = outcome.as_dict()
        return Submitted(error=ErrorBody(error=told["error"], message=told["message"], hint=told["hint"]))
    return Submitted(id=outcome)


def documented(*more: type[IsthmusError]) -> dict[int | str, dict[str, Any]]:
    """Return what the schema says of `more` errors, beside those that every request may meet."""
    found: dict[int | str, dict[str, Any]] = {}
    errors: tuple[type[IsthmusError], ...] = (*more, UnknownCallerError, AuthError, InputError)
    for error in errors:
        name = "AuthError" if issubclass(error, AuthError) else error.__name__
        found[error.http_status] = {"model": ErrorBody, "description": name}
    return found
