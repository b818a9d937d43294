"""ASGI middleware: checks the token and limits the body size before a request is parsed."""

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

PUBLIC_PATHS = ("/v1/health",)
"""Paths under `/v1/` that need no token."""
TOKEN_CACHE_S = 10.0
"""How long a verified token is cached: a deleted token is rejected after at most this time."""
MAX_CACHED_TOKENS = 10_000
"""Largest number of cached tokens."""
METRICS_PATH = "/metrics"
"""The only path outside `/v1/` that needs a token."""


class TokenMiddleware:
    """Authenticates requests before the body is read: sets the request state's `caller`, or answers 401.

    `identify` receives the `Authorization` header (None if missing) and raises `AuthError`. Its result is
    cached for `TOKEN_CACHE_S` by the hash of the header, so that a busy client does not load the store.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        identify: Callable[[str | None], Caller],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._identify, self._clock = app, identify, clock
        self._token_cache: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request if its token is valid or not needed."""
        if scope["type"] == "http" and _needs_token(scope["path"]):
            header = dict(scope["headers"]).get(b"authorization")
            try:
                caller = await self._caller(header)
            except IsthmusError as error:
                await error_response(error, error.http_status)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    async def _caller(self, header: bytes | None) -> Caller:
        if header is None:
            return await run_in_threadpool(self._identify, None)
        key, now_s = hashlib.sha256(header).digest(), self._clock()
        known = self._token_cache.get(key)
        if known is not None and now_s < known[0]:
            return known[1]
        found = await run_in_threadpool(self._identify, header.decode("latin-1"))
        self._token_cache[key] = now_s + TOKEN_CACHE_S, found
        self._token_cache.move_to_end(key)
        if len(self._token_cache) > MAX_CACHED_TOKENS:
            self._token_cache.popitem(last=False)
        return found


def _needs_token(path: str) -> bool:
    return (path.startswith("/v1/") or path == METRICS_PATH) and path not in PUBLIC_PATHS


class BodySizeMiddleware:
    """ASGI middleware: answers 413 if the declared or actual body size exceeds `max_bytes`."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._message = f"the body is larger than {max_bytes} bytes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request and count the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        claimed = dict(scope["headers"]).get(b"content-length", b"0")
        if not claimed.isdigit() or int(claimed) > self._max_bytes:
            await error_response(InputError(self._message), 413)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, detail=self._message)
            return message

        await self._app(scope, counted, send)


def error_response(error: IsthmusError, status: int) -> JSONResponse:
    """Return an error as a JSON response."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error.as_dict(), status_code=status, headers=headers)
