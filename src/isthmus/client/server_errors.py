"""Map error responses and connection failures to Isthmus errors."""

from __future__ import annotations

import httpx

from isthmus.core import errors
from isthmus.core.errors import (
    AuthError,
    ConflictError,
    InputError,
    IsthmusError,
    NotFoundError,
    ProtocolError,
    RateLimitError,
    UnavailableError,
)

_BY_STATUS: dict[int, type[IsthmusError]] = {
    401: AuthError, 403: AuthError, 404: NotFoundError, 409: ConflictError, 422: InputError,
    426: ProtocolError, 429: RateLimitError, 502: UnavailableError, 503: UnavailableError, 504: UnavailableError,
}  # fmt: skip


def unreachable_error(server: str, error: httpx.TransportError, *, unsent: bool) -> UnavailableError:
    """Return the error for a server that did not respond; `unsent`: the connection failed."""
    if unsent:
        return UnavailableError(
            f"no server at {server}: {error}",
            hint="start one with `isthmus serve`, or set --server or ISTHMUS_SERVER",
        )
    return UnavailableError(
        f"the server at {server} did not respond: {error or type(error).__name__}",
        hint="it may be restarting; run the command again",
    )


def error_from_response(response: httpx.Response, server: str) -> IsthmusError:
    """Return the error that a response body names, or the one for its HTTP status."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("message"), str):
        kind = _BY_STATUS.get(response.status_code, IsthmusError)
        return kind(f"{server} returned {response.status_code} {response.reason_phrase}")
    named = getattr(errors, str(body.get("error")), None)
    if not (isinstance(named, type) and issubclass(named, IsthmusError)):
        named = _BY_STATUS.get(response.status_code, IsthmusError)
    if issubclass(named, errors.FileError):  # its message already has the location
        named = InputError
    hint = body.get("hint")
    if issubclass(named, AuthError) and response.status_code == 401:
        hint = "give --token-file FILE or set ISTHMUS_TOKEN_FILE; the pool's operator creates tokens"
    return named(body["message"], hint=hint if isinstance(hint, str) else None)
