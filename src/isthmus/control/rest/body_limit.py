"""`BodyLimits`, the largest body of each kind of request, and the middleware that holds requests to it.

A body above its limit is never parsed: the announced length is checked before a byte is read, and a body without one
is counted as it arrives and given up at the first byte beyond.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.control.rest.middleware import error_response
from isthmus.core.errors import InputError, TooLargeError

MAX_BODY_BYTES = 16 * 2**20
"""Largest body of any request: a bulk submission, a report of an agent, or a job of an admin."""
MAX_SMALL_BODY_BYTES = 1 << 20
"""Largest body of a request that is neither a submission nor a report."""
_JOB_PATHS = ("/v1/jobs", "/v1/jobs:dry-run")
_JOB_OVERHEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class BodyLimits:
    """The limits in bytes; `job_bytes` is the quota of a stored job, None without one."""

    job_bytes: int | None = None

    def of(self, path: str, role: str) -> int:
        """Return the largest body of a request at `path` by a caller of `role` ("": unknown).

        JSON may spell a job with up to twice its stored bytes. An admin has no quota.
        """
        if path == "/v1/jobs:bulk" or path.endswith("/sync"):
            return MAX_BODY_BYTES
        if path not in _JOB_PATHS:
            return MAX_SMALL_BODY_BYTES
        if self.job_bytes is None or role == "admin":
            return MAX_BODY_BYTES
        return min(MAX_BODY_BYTES, 2 * self.job_bytes + _JOB_OVERHEAD_BYTES)

    def error(self, path: str, max_bytes: int) -> InputError:
        """Return the error for a larger body."""
        if path in _JOB_PATHS and max_bytes < MAX_BODY_BYTES:
            return TooLargeError(
                f"the body is larger than {max_bytes:,} bytes; a job takes at most {self.job_bytes:,}",
                hint="name folders or globs in data.paths instead of single files; the operator sets --max-job-kib",
            )
        return InputError(f"the body is larger than {max_bytes} bytes")


class BodyTooLargeError(HTTPException):
    """More bytes have arrived than the request may have; `refusal` is the error that answers it."""

    def __init__(self, refusal: InputError) -> None:
        super().__init__(413, detail=refusal.message)
        self.refusal = refusal


class BodySizeMiddleware:
    """ASGI middleware: answers 413 if the declared or actual size of a body exceeds its limit."""

    def __init__(self, app: ASGIApp, *, limits: BodyLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request and count the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = str(scope["path"])
        caller = scope.get("state", {}).get("caller")
        max_bytes = self._limits.of(path, caller.role if caller is not None else "")
        refusal = self._limits.error(path, max_bytes)
        claimed = dict(scope["headers"]).get(b"content-length", b"0")
        if not claimed.isdigit() or int(claimed) > max_bytes:
            await error_response(refusal, 413)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise BodyTooLargeError(refusal)
            return message

        await self._app(scope, counted, send)
