"""`DeviceSignIn`: a command signs in at the provider on behalf of a person at a browser (RFC 8628).

The server asks the provider, since it alone has the client's secret; the device code, which only the command has, is
what the token is given for. Nothing of a begun sign-in is kept but when it was last asked for.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable

from pydantic import ValidationError

from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.console_sessions import SESSION_S
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.auth import Caller, token_digest
from isthmus.control.service.oidc.identity_token import check_identity_token
from isthmus.control.service.oidc.oidc_provider import OidcProvider, PendingSignInError
from isthmus.control.service.oidc.person_tokens import person_id, person_tokens
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.errors import NotFoundError, RateLimitError, UnavailableError
from isthmus.core.owner.oidc_file import is_safe_url
from isthmus.core.views.access_views import DeviceAnswer, DeviceBegun

MAX_TOKENS = 10
"""Tokens of commands that a person has at one time; a further one ends the oldest."""
MAX_BEGUN, BEGUN_WITHIN_S = 60, 60.0
"""Sign-ins that may begin within a time: each asks the provider."""
LEAST_POLL_S = 1.0
"""Least time between two questions about one device code that reach the provider."""
MAX_POLLED = 4_096


class DeviceSignIn:
    """Sign-ins of commands by `provider`; None: the pool has none. `clock` returns seconds since the epoch."""

    def __init__(
        self, provider: OidcProvider | None, registry: TokenRegistry, audit: AuditLog, clock: Callable[[], float]
    ) -> None:
        self._provider, self._registry, self._audit, self._clock = provider, registry, audit, clock
        self._lock = threading.Lock()
        self._begun_s: list[float] = []
        # When a device code was last asked for, by its digest.
        self._polled_s: OrderedDict[str, float] = OrderedDict()

    def begin(self) -> DeviceBegun:
        """Return the code that a person enters at the provider, and the secret of the command."""
        provider, now_s = self._require(), self._clock()
        with self._lock:
            self._begun_s = [one for one in self._begun_s if now_s - BEGUN_WITHIN_S < one <= now_s]
            if len(self._begun_s) >= MAX_BEGUN:
                raise RateLimitError("too many commands sign in at once", hint="try again in a minute")
            self._begun_s.append(now_s)
        found = provider.begin_device()
        urls = {"url": found.get("verification_uri"), "complete_url": found.get("verification_uri_complete")}
        if any(one is not None and not _is_page(one) for one in urls.values()):
            raise _broken("it sends persons to no https address")
        try:
            return DeviceBegun.model_validate(
                {
                    "device_code": found.get("device_code"), "user_code": found.get("user_code"),
                    "expires_in_s": found.get("expires_in"), "interval_s": found.get("interval", 5),
                }
                | urls
            )  # fmt: skip
        except ValidationError as error:
            raise _broken(f"its code for a command has no usable {error.errors()[0]['loc'][0]}") from error

    def finish(self, device_code: str, address: str) -> DeviceAnswer:
        """Return a token once the person has signed in; raise `AuthError` if the provider refuses the code."""
        provider, now_s, digest = self._require(), self._clock(), token_digest(device_code)
        with self._lock:
            last_s = self._polled_s.pop(digest, None)
            self._polled_s[digest] = now_s
            while len(self._polled_s) > MAX_POLLED:
                self._polled_s.popitem(last=False)
        if last_s is not None and 0 <= now_s - last_s < LEAST_POLL_S:
            return DeviceAnswer(slow_down=True)
        try:
            token = provider.exchange_device(device_code)
        except PendingSignInError as error:
            return DeviceAnswer(slow_down=error.slow_down)
        found = check_identity_token(token, provider.file, None, now_s, lambda fresh: provider.keys(fresh=fresh))
        issuer = provider.file.issuer
        known = person_tokens(self._registry, found, issuer, "oidc-command", now_s)
        for oldest in known[: max(0, len(known) - MAX_TOKENS + 1)]:
            self._registry.put(oldest.model_copy(update={"revoked_s": now_s}))
        secret = secrets.token_urlsafe(32)
        made = StoredToken(
            role=found.role, name=found.name, digest=token_digest(secret), created_s=now_s,
            expires_s=now_s + SESSION_S, created_by=person_id(found, issuer, "oidc-command"),
        )  # fmt: skip
        caller = Caller(role=found.role, name=found.name, token_id=made.id, address=address)
        self._registry.put(made, self._audit.line("signed-in", caller, made.id, "a command, by the provider"))
        return DeviceAnswer(token=secret, role=found.role, name=found.name, expires_s=made.expires_s)

    def _require(self) -> OidcProvider:
        if self._provider is None:
            raise NotFoundError("this pool has no provider of sign-ins", hint="sign in with a token")
        return self._provider


def _is_page(url: object) -> bool:
    """Return whether a person may be sent to an address, which may have a query."""
    return isinstance(url, str) and url.isascii() and url.isprintable() and is_safe_url(url.partition("?")[0])


def _broken(problem: str) -> UnavailableError:
    return UnavailableError(f"the provider of sign-ins fails: {problem}", hint="sign in with a token")
