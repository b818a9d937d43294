"""`TokenGate`: authenticates requests by their header `Authorization` and limits those without a valid token.

A valid token is found first, in memory, so failures of others at its address never hold it up.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable
from typing import cast

from isthmus.control.service.access.login_backoff import LoginBackoff
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
        token = _token(authorization)
        if token is None or not self.registry.is_fresh():
            return None
        return _caller(self.registry.find(token_digest(token)))

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
        token = _token(authorization)
        if token is None or self.refuses_unknown(address):
            raise self.refuse(address)
        digest = token_digest(token)
        found = self.registry.look_up(digest)
        if found is None or not hmac.compare_digest(found.digest, digest):
            raise self.refuse(address)
        return cast(Caller, _caller(found))

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


def _token(authorization: bytes | None) -> str | None:
    """Return the token of a header `Bearer TOKEN`, None for any other header."""
    if authorization is None or len(authorization) > MAX_TOKEN_BYTES:
        return None
    scheme, _, token = authorization.decode("latin-1").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _caller(token: StoredToken | None) -> Caller | None:
    if token is None:
        return None
    return Caller(
        role=cast(Role, token.role), name=token.name, token_id=token.id, high=token.high, site=token.site,
        replaces=token.replaces,
    )  # fmt: skip
