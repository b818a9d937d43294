"""ASGI middleware, passed before a request is read: a valid token, and a body of bearable size."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.control.service.auth import Caller
from isthmus.core.errors import InputError, IsthmusError

OPEN = ("/v1/health",)
"""Paths below `/v1/` that need no token."""
TRUST_S = 10.0
"""A token taken out of the store is refused after at most so long."""
MOST_TRUSTED = 10_000
"""Tokens remembered at one time."""
METRICS = "/metrics"
"""The one path outside that needs one."""


class TokenGate:
    """Answers 401 before the body is read; who was let in is in the request's state as `caller`.

    `identify` is given the `Authorization` header (None without) and raises `AuthError`. Who was let in is
    believed for `TRUST_S`, by the hash of the header, so that a busy client costs the store nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        identify: Callable[[str | None], Caller],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._identify, self._clock = app, identify, clock
        self._trusted: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on once its token is known, or where it needs none."""
        if scope["type"] == "http" and _needs_token(scope["path"]):
            header = dict(scope["headers"]).get(b"authorization")
            try:
                caller = await self._caller(header)
            except IsthmusError as error:
                await as_json(error, error.http_status)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    async def _caller(self, header: bytes | None) -> Caller:
        if header is None:
            return await run_in_threadpool(self._identify, None)
        key, now_s = hashlib.sha256(header).digest(), self._clock()
        known = self._trusted.get(key)
        if known is not None and now_s < known[0]:
            return known[1]
        found = await run_in_threadpool(self._identify, header.decode("latin-1"))
        self._trusted[key] = now_s + TRUST_S, found
        self._trusted.move_to_end(key)
        if len(self._trusted) > MOST_TRUSTED:
            self._trusted.popitem(last=False)
        return found


def _needs_token(path: str) -> bool:
    return (path.startswith("/v1/") or path == METRICS) and path not in OPEN


class BodyLimit:
    """ASGI middleware: answers 413 as soon as a body is, or says it will be, larger than `max_bytes`."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._too_large = f"the body is larger than {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        claimed = dict(scope["headers"]).get(b"content-length", b"0")
        if not claimed.isdigit() or int(claimed) > self._max_bytes:
            await as_json(InputError(self._too_large), 413)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, detail=self._too_large)
            return message

        await self._app(scope, counted, send)


def as_json(error: IsthmusError, status: int) -> JSONResponse:
    """Return the answer that an error is."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error.as_dict(), status_code=status, headers=headers)
