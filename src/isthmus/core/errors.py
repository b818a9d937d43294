"""Every error Isthmus raises on purpose, as one tree.

    IsthmusError                    what went wrong, which value, what to do next
    ├── InputError                  the user can mend it: a file, an option, a name
    │   ├── FileError               a line of a file the user wrote
    │   ├── ModelError              a model folder or config.json that cannot be used
    │   └── DataError               training data that is missing or malformed
    ├── PlanError                   no plan exists, or a plan cannot be executed
    ├── AuthError                   no token, an unknown token, or another owner's thing
    ├── NotFoundError               no such job, plan, cluster
    ├── ConflictError               not allowed in the present state
    ├── ProtocolError               two sides that do not speak the same version
    ├── UnavailableError            a server, port, disk or peer that cannot be had
    │   └── PeerError               a peer of the training run was lost: which, and during what
    │       └── RestartError        it was, and its place is taken again: the ranks meet anew
    └── IllegalTransitionError      a bug: a state machine was asked for a step it does not have

The command line exits with `exit_code`; the server answers with `http_status`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


class IsthmusError(Exception):
    """Base of the tree. `message` says what and which value; `hint` says what to do next."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def as_dict(self) -> dict[str, Any]:
        """Return the error as the server and `--json` print it."""
        return {"error": type(self).__name__, "message": self.message, "hint": self.hint}


class InputError(IsthmusError):
    """Something the user wrote is wrong, and the user can mend it."""

    exit_code = 2
    http_status = 422


class FileError(InputError):
    """A mistake in a file: `file`, 1-based `line`, dotted `field` and the offending `value`."""

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
        """Return the error with its place in the file."""
        value = self.value
        endless = isinstance(value, float) and not math.isfinite(value)  # JSON has no word for it
        if endless or not isinstance(value, str | int | float | bool | None):
            value = str(value)
        place = {"file": self.file, "line": self.line, "field": self.field, "value": value}
        return super().as_dict() | place


class ModelError(InputError):
    """A model folder or `config.json` that is missing, malformed or not supported."""


class DataError(InputError):
    """Training data that is missing, empty or malformed."""


class PlanError(IsthmusError):
    """No plan exists for the job on this pool, or the runtime cannot execute the plan."""

    exit_code = 3
    http_status = 409


class AuthError(IsthmusError):
    """The caller is unknown, or may not see or change this."""

    exit_code = 4
    http_status = 403


class NotFoundError(IsthmusError):
    """The named thing does not exist (or is not the caller's to see)."""

    exit_code = 5
    http_status = 404


class ConflictError(IsthmusError):
    """The request is valid, but not in the present state of the thing."""

    exit_code = 6
    http_status = 409


class ProtocolError(IsthmusError):
    """The other side speaks another version of the protocol or of a file format."""

    exit_code = 7
    http_status = 426


class UnavailableError(IsthmusError):
    """A server, port, disk or peer that cannot be had now."""

    exit_code = 8
    http_status = 503


class PeerError(UnavailableError):
    """A peer of a training run was lost; the message names the peer and the operation."""

    exit_code = 9


class RestartError(PeerError):
    """The place of a lost peer is taken again: the ranks meet anew, as `incarnation` of their group."""

    def __init__(self, message: str, *, incarnation: int = 0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.incarnation = incarnation


class IllegalTransitionError(IsthmusError):
    """A state machine was asked for a step that its table does not have: a bug, with its story."""
