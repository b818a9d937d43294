"""The exception hierarchy of Isthmus.

    IsthmusError                    base: what went wrong, with which value, what to do next
    ├── InputError                  invalid user input: a file, an option, a name
    │   ├── TooLargeError           a job larger than the server accepts
    │   ├── FileError               an invalid line in a user's file
    │   ├── FieldError              an invalid field of a file that was read before
    │   ├── ModelError              an unusable model folder or config.json
    │   └── DataError               missing or malformed training data
    ├── PlanError                   no plan exists, or the runtime cannot execute a plan
    ├── AuthError                   missing or unknown token, or insufficient permission
    ├── NotFoundError               unknown job, plan or cluster
    ├── ConflictError               not allowed in the current state
    │   └── QuotaError              a user or an owner has as much as it may have
    ├── ProtocolError               protocol or format versions differ
    ├── UnavailableError            a server, port, disk or peer is unavailable
    │   ├── RateLimitError          too many requests, connections or streams of one caller or address
    │   └── PeerError               a training run lost a peer
    │       └── RestartError        the lost peer was replaced; the ranks re-form their group
    └── IllegalTransitionError      a state machine has no such transition (a bug)

The command line exits with `exit_code`; the server responds with `http_status`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


class IsthmusError(Exception):
    """Base class. `message` says what is wrong with which value; `hint` says what to do next."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that the server and `--json` print."""
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint}


class InputError(IsthmusError):
    """Invalid user input that the user can fix."""

    exit_code = 2
    http_status = 422


class TooLargeError(InputError):
    """A request that is larger than the server accepts."""

    http_status = 413


class FileError(InputError):
    """An error in a user's file: `file`, 1-based `line`, dotted `field`, invalid `value`."""

    def __init__(
        self,
        message: str,
        *,
        file: str,
        line: int | None = None,
        field: str | None = None,
        value: Any = None,
        hint: str | None = None,
    ) -> None:
        where = file if line is None else f"{file}:{line}"
        super().__init__(f"{where}: {field + ': ' if field else ''}{message}", hint=hint)
        self.file, self.line, self.field, self.value = file, line, field, value

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the location in the file."""
        value = self.value
        not_finite = isinstance(value, float) and not math.isfinite(value)  # not representable in JSON
        if not_finite or not isinstance(value, str | int | float | bool | None):
            value = str(value)
        place = {"file": self.file, "line": self.line, "field": self.field, "value": value}
        return super().as_dict() | place


class FieldError(InputError):
    """A field that is valid in itself and wrong at its site: `place` names it from the top of its file.

    `problem` is the message without the place; an error that has crossed the wire has its place in the message alone.
    """

    def __init__(self, problem: str, *, place: tuple[str, ...] = (), hint: str | None = None) -> None:
        super().__init__(f"{'.'.join(place)}: {problem}" if place else problem, hint=hint)
        self.problem, self.place = problem, place


class ModelError(InputError):
    """A missing, malformed or unsupported model folder or `config.json`."""


class DataError(InputError):
    """Missing, empty or malformed training data."""


class PlanError(IsthmusError):
    """No plan exists for the job on this pool, or the runtime cannot execute the plan."""

    exit_code = 3
    http_status = 409


class AuthError(IsthmusError):
    """The caller is unknown or lacks permission."""

    exit_code = 4
    http_status = 403


class NotFoundError(IsthmusError):
    """The named object does not exist or is not visible to the caller."""

    exit_code = 5
    http_status = 404


class ConflictError(IsthmusError):
    """The request is valid but not allowed in the current state."""

    exit_code = 6
    http_status = 409


class QuotaError(ConflictError):
    """A user or an owner has as many jobs or clusters as the operator allows."""

    http_status = 429


class ProtocolError(IsthmusError):
    """The other side uses a different version of the protocol or of a file format."""

    exit_code = 7
    http_status = 426


class UnavailableError(IsthmusError):
    """A server, port, disk or peer is unavailable."""

    exit_code = 8
    http_status = 503


class RateLimitError(UnavailableError):
    """Too many requests, connections or event streams of one caller or address; later ones may pass."""

    http_status = 429


class PeerError(UnavailableError):
    """A training run lost a peer; the message names the peer and the operation."""

    exit_code = 9


class RestartError(PeerError):
    """A lost peer was replaced: the ranks must re-form their group with number `incarnation`."""

    def __init__(self, message: str, *, incarnation: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.incarnation = incarnation


class IllegalTransitionError(IsthmusError):
    """A state machine has no such transition (a bug); the message includes the history."""
