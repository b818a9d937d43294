"""`TokenGate`: authenticates requests by their `credentials` and limits those without a valid token.

A valid token is found first, in memory, so failures of others at its address never hold it up.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from isthmus.control.service.access.login_backoff import LoginBackoff
from isthmus.control.service.access.session_cookie import SESSION_SCHEME
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.auth import Caller, Role, UnknownCallerError, token_digest
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.errors import RateLimitError

REPORT_INTERVAL_S = 60.0
"""Least interval between two reports of failed logins."""
MAX_REPORTED = 20
"""Addresses that a report names one by one; the rest are counted together."""
MAX_TOKEN_BYTES = 512
"""Longest header that can hold a token."""

_log = logging.getLogger("isthmus.server")
FailureReport = Callable[[str, int], None]
"""Receives an address (or "other addresses") and its number of failed logins."""


class TooManyFailuresError(RateLimitError):
    """Too many requests without a valid token: HTTP status 429. `delay_s` is how long to wait."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(
            "too many requests without a valid token",
            hint=f"wait {delay_s:.0f} s, then send 'Authorization: Bearer TOKEN' with a token that an admin made",
        )
        self.delay_s = delay_s

    def as_dict(self) -> dict[str, str | None]:
        """Return the error under the name of the public tree."""
        return super().as_dict() | {"error": "RateLimitError"}


class TokenGate:
    """Finds the caller of a request; thread-safe. `monotonic` is the clock of the back-off."""

    def __init__(self, registry: TokenRegistry, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry
        self._monotonic = monotonic
        self._backoff = LoginBackoff()
        self._lock = threading.Lock()
        self._reported_s = float("-inf")

    def known(self, authorization: bytes | None) -> Caller | None:
        """Return the caller of a header as far as memory knows it, None otherwise."""
        shown = _shown(authorization)
        if shown is None or not self.registry.is_fresh():
            return None
        found = self.registry.find(token_digest(shown.secret))
        return _caller(found) if found is not None and shown.fits(found) else None

    def refuses_unknown(self, address: str) -> bool:
        """Return whether a request from `address` whose token memory does not know is refused at once."""
        return self.registry.is_fresh() and self._backoff.is_limited(address, self._monotonic())

    def refuse(self, address: str) -> TooManyFailuresError | UnknownCallerError:
        """Count a failed login of `address`; return the error that answers it."""
        delay_s = self.count_failure(address)
        return TooManyFailuresError(delay_s) if delay_s else UnknownCallerError()

    def count_failure(self, address: str) -> float:
        """Count a failed login of `address`; return the seconds that its sender should wait, 0 for none."""
        with self._lock:
            return self._backoff.record_failure(address, self._monotonic())

    def look_up(self, authorization: bytes | None, address: str) -> Caller:
        """Return the caller of a header that `known` does not know, from the store; raise the error for others."""
        shown = _shown(authorization)
        if shown is None or self.refuses_unknown(address):
            raise self.refuse(address)
        digest = token_digest(shown.secret)
        found = self.registry.look_up(digest)
        if found is None or not hmac.compare_digest(found.digest, digest) or not shown.fits(found):
            raise self.refuse(address)
        return _caller(found)

    def report_failures(self, report: FailureReport) -> None:
        """Log the failed logins since the last report and pass them to `report`, once a minute at most."""
        now_s = self._monotonic()
        with self._lock:
            if now_s - self._reported_s < REPORT_INTERVAL_S:
                return
            by_address, num_unlisted = self._backoff.take_report()
            if not by_address:
                return
            self._reported_s = now_s
        ranked = sorted(by_address.items(), key=lambda one: -one[1])
        rest = sum(number for _, number in ranked[MAX_REPORTED:]) + num_unlisted
        total = sum(by_address.values()) + num_unlisted
        _log.warning("requests without a valid token: %d, most of them from %s", total, ranked[0][0])
        for address, number in ranked[:MAX_REPORTED]:
            report(address, number)
        if rest:
            report("other addresses", rest)


class _Shown(NamedTuple):
    """The secret that a request shows, and whether as a session of the console."""

    secret: str
    session: bool

    def fits(self, token: StoredToken) -> bool:
        """Return whether the token is of the kind that was shown: half a session is no bearer token."""
        return bool(token.session_of) == self.session


def _shown(authorization: bytes | None) -> _Shown | None:
    """Return what `Bearer TOKEN` or `session COOKIE.KEY` shows, None for any other text."""
    if authorization is None or len(authorization) > MAX_TOKEN_BYTES:
        return None
    scheme, _, secret = authorization.decode("latin-1").partition(" ")
    if scheme.lower() not in ("bearer", SESSION_SCHEME) or not secret.strip():
        return None
    return _Shown(secret.strip(), scheme == SESSION_SCHEME)


def _caller(token: StoredToken) -> Caller:
    return Caller(
        role=cast(Role, token.role), name=token.name, token_id=token.id, high=token.high, site=token.site,
        replaces=token.replaces,
    )  # fmt: skip
