"""ASGI middleware: checks a request's head and token, limits its caller, adds security headers."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.caller_limits import CallerLimits
from isthmus.control.service.access.session_cookie import KEY_HEADER, SESSION_SCHEME, credentials
from isthmus.control.service.access.token_gate import TokenGate, TooManyFailuresError
from isthmus.control.service.auth import Caller
from isthmus.core.errors import AuthError, InputError, IsthmusError, RateLimitError
from isthmus.core.text.printable import printable

SIGN_IN_PATHS = ("/v1/oidc/begin", "/v1/oidc/session", "/v1/oidc/device", "/v1/oidc/device/token")
"""Paths without a token by which persons sign in: no page of another origin sends them."""
PUBLIC_PATHS = ("/v1/health", "/v1/oidc", *SIGN_IN_PATHS)
"""Paths under `/v1/` that need no token."""
METRICS_PATH = "/metrics"
"""The only path outside `/v1/` that needs a token."""
JOIN_PATH = "/v1/join"
"""The only path of a code, which is a token that joins a cluster; no other token is accepted there."""
_SESSION_HINT = "open the console at the server's own address"
_JOIN_HINT = "isthmus site join CODE; the operator makes codes: isthmus site invite OWNER"
EVENTS_PATH = "/v1/events"
"""The path of the event streams, which `OpenStreams` limits."""
_SINGLE_HEADERS = (b"authorization", b"content-length", b"cookie", b"host", KEY_HEADER.encode())
RETRY_AFTER_S = 1.0
"""Delay that an answer to too many requests names, unless the error does."""
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
"""Headers of every answer: no foreign host, no script, no frame, no guessed type (OWASP REST Security)."""


class ProvenConnection(Protocol):
    """What the server offers of the connection of a request, as `connection` of the request's state."""

    def prove(self, caller: str) -> bool:
        """Count the connection as one of `caller`; return whether it may have another one."""


class HeadMiddleware:
    """Rejects heads that two readers may read differently (RFC 9112, section 6.3); adds `SECURITY_HEADERS`."""

    def __init__(self, app: ASGIApp, *, audit: AuditLog) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request if its head is unambiguous."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if scope.get("scheme") == "https":
                    headers.setdefault("Strict-Transport-Security", "max-age=31536000")
            await send(message)

        names = [name for name, _ in scope["headers"]]
        repeated = [name for name in _SINGLE_HEADERS if names.count(name) > 1]
        if b"content-length" in names and b"transfer-encoding" in names:
            repeated.append(b"content-length and transfer-encoding")
        if repeated:
            error = InputError(f"ambiguous request: {repeated[0].decode()} is given twice", hint="send it once")
            self._audit.record_stranger("refused", _address(scope), str(scope["path"]), error.message)
            await error_response(error, 400, close=True)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


class TokenMiddleware:
    """Authenticates requests before the body is read: sets the request state's `caller`, or answers 401 or 429.

    The address is that of the connection: no header changes it.
    """

    def __init__(self, app: ASGIApp, *, gate: TokenGate, audit: AuditLog) -> None:
        self._app, self._gate, self._audit, self._limits = app, gate, audit, CallerLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request if its token is valid or not needed, once its caller has its turn."""
        if scope["type"] != "http" or not needs_token(scope["path"]):
            foreign = _foreign_origin(scope) if scope["type"] == "http" and scope["path"] in SIGN_IN_PATHS else ""
            if foreign:
                error = AuthError(f"pages of this server alone sign in, not {foreign}", hint=_SESSION_HINT)
                self._audit.record_stranger("refused", _address(scope), str(scope["path"]), error.message)
                await error_response(error, error.http_status)(scope, receive, send)
                return
            await self._app(scope, receive, send)
            return
        try:
            caller = await self._caller(scope)
            state = scope.setdefault("state", {})
            state["caller"] = caller
            connection: ProvenConnection | None = state.get("connection")
            who = f"{caller.role} {caller.name}"
            if connection is not None and not connection.prove(who):
                raise RateLimitError(f"{who} has too many connections", hint="close some, and try again")
            if scope["path"] == EVENTS_PATH:
                await self._app(scope, receive, send)
                return
            async with self._limits.turn(who):
                await self._app(scope, receive, send)
        except IsthmusError as error:
            caller = scope.get("state", {}).get("caller")
            if caller is not None:
                self._audit.record("refused", caller, str(scope["path"]), error.message)
            await error_response(error, error.http_status)(scope, receive, send)

    async def _caller(self, scope: Scope) -> Caller:
        header = credentials(scope["headers"], secure=scope.get("scheme") == "https")
        address = _address(scope)
        if header is not None and header.startswith(SESSION_SCHEME.encode()) and (foreign := _foreign_origin(scope)):
            error = AuthError(f"a session acts for pages of this server alone, not for {foreign}", hint=_SESSION_HINT)
            self._audit.record_stranger("refused", address, str(scope["path"]), error.message)
            raise error
        known = self._gate.known(header)
        if known is None and self._gate.refuses_unknown(address):
            raise self._gate.refuse(address)
        if known is None:
            known = await run_in_threadpool(self._gate.look_up, header, address)
        if (known.role == "joiner") != (scope["path"] == JOIN_PATH):
            error = AuthError("a site joins by the code of an invitation, which does nothing else", hint=_JOIN_HINT)
            self._audit.record("refused", replace(known, address=address), str(scope["path"]), error.message)
            raise error
        return replace(known, address=address)


def _foreign_origin(scope: Scope) -> str:
    """Return the page that sent a request as far as a browser says so, "" for one of this server (Fetch Metadata)."""
    headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
    own = f"{scope.get('scheme', 'http')}://{headers.get(b'host', '')}"
    origin, fetched = headers.get(b"origin", own), headers.get(b"sec-fetch-site", "same-origin")
    if origin != own:
        return printable(origin, max_chars=200)
    return "" if fetched == "same-origin" else f"a page of another origin ({printable(fetched, max_chars=40)})"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def needs_token(path: str) -> bool:
    """Return whether requests of a path need a token."""
    return (path.startswith("/v1/") or path == METRICS_PATH) and path not in PUBLIC_PATHS


def error_response(error: IsthmusError, status: int, *, close: bool = False) -> JSONResponse:
    """Return an error as a JSON response; `close` ends the connection after it."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status == 429:
        delay_s = error.delay_s if isinstance(error, TooManyFailuresError) else RETRY_AFTER_S
        headers["Retry-After"] = f"{delay_s:.0f}"
    if close or isinstance(error, TooManyFailuresError):
        headers["Connection"] = "close"
    return JSONResponse(error.as_dict(), status_code=status, headers=headers)
