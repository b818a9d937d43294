"""`ConsoleSessions`: sessions of the web console, each for one token, stored like tokens as a hash.

A session ends with its token, when it is revoked, or after `SESSION_S`; a server that starts again knows it still.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.auth import Caller, token_digest
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.errors import AuthError, QuotaError
from isthmus.core.views.access_views import SessionView

SESSION_S = 12 * 3600.0
"""How long a session counts at most."""
MAX_SESSIONS = 20
"""Sessions of a token at one time; a further one ends the oldest."""
MAX_SIGN_INS = 200
"""Sessions of a token within `SESSION_S`, ended ones as well: each is kept until then."""


class NewSession(NamedTuple):
    """A session that has begun: the half of its secret for the cookie, and what its page gets, with the other half."""

    cookie: str
    view: SessionView


class ConsoleSessions:
    """Starts and ends sessions of callers; `clock` returns seconds since the epoch."""

    def __init__(self, registry: TokenRegistry, audit: AuditLog, clock: Callable[[], float]) -> None:
        self._registry, self._audit, self._clock = registry, audit, clock

    def start(self, caller: Caller) -> NewSession:
        """Begin a session for the token of `caller`.

        Raises `AuthError` for the key of a site's agent and for a session, which would prolong itself, and
        `QuotaError` for too many sign-ins with one token.
        """
        now_s, token = self._clock(), self._registry.get(caller.token_id)
        if token is None or token.session_of or token.site or token.role == "joiner":
            raise AuthError(
                "only a token of a person signs in",
                hint="use a token that an admin made: isthmus token create --user NAME",
            )
        self._registry.prune_sessions()
        mine = [one for one in self._registry.tokens() if one.session_of == token.digest]
        if len(mine) >= MAX_SIGN_INS:
            raise QuotaError(
                f"{token.id} has signed in {len(mine)} times within {SESSION_S / 3600:g} h",
                hint="wait, or use another token",
            )
        live = [one for one in mine if one.is_valid(now_s)]
        for oldest in live[: max(0, len(live) - MAX_SESSIONS + 1)]:
            self._registry.put(oldest.model_copy(update={"revoked_s": now_s}))
        cookie, key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        expires_s = min(now_s + SESSION_S, token.expires_s if token.expires_s is not None else now_s + SESSION_S)
        session = StoredToken(
            role=token.role, name=token.name, digest=token_digest(f"{cookie}.{key}"), created_s=now_s,
            expires_s=expires_s, created_by=token.name, high=token.high, session_of=token.digest,
        )  # fmt: skip
        self._registry.put(session, self._audit.line("signed-in", caller, session.id, f"session of {token.id}"))
        fields = {"id": session.id, "role": token.role, "name": token.name, "expires_s": expires_s, "key": key}
        return NewSession(cookie, SessionView.model_validate(fields))

    def view(self, caller: Caller) -> SessionView:
        """Return the session of `caller`, or what a session of its token would be, without a secret."""
        token = self._registry.get(caller.token_id)
        expires_s = token.expires_s if token is not None else None
        return SessionView.model_validate(
            {"id": caller.token_id, "role": caller.role, "name": caller.name, "expires_s": expires_s}
        )

    def end(self, caller: Caller) -> None:
        """End the session of `caller`; a token by itself stays."""
        token, now_s = self._registry.get(caller.token_id), self._clock()
        if token is None or not token.session_of:
            raise AuthError("this is no session of the console", hint="isthmus token revoke ID ends a token")
        line = self._audit.line("signed-out", caller, token.id)
        self._registry.put(token.model_copy(update={"revoked_s": now_s}), line)
