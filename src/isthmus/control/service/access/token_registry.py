"""`TokenRegistry`: the digests of all tokens in memory, so that a request is authenticated without the store.

It follows the store by a cheap comparison at each tick, so a token that another server revokes is rejected within a
second. If the store has not answered for `STALE_S`, each request asks the store itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from isthmus.control.store.store_interface import Store, StoredToken
from isthmus.core.process.subscribers import Subscribers
from isthmus.core.views.access_views import AuditRecord

STALE_S = 5.0
"""Seconds without an answer of the store after which the tokens in memory are no longer believed."""


class TokenRegistry:
    """The tokens of `store`; thread-safe. `clock` is the time of expiry, in seconds since the epoch."""

    def __init__(
        self, store: Store, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._clock, self._monotonic = store, clock, monotonic
        self._lock = threading.Lock()
        self._tokens: dict[str, StoredToken] = {}
        self._by_id: dict[str, StoredToken] = {}
        self._version: object = None
        self._read_s: float | None = None
        self._subscribers = Subscribers()

    def is_fresh(self) -> bool:
        """Return whether the store was read within `STALE_S`."""
        return self._read_s is not None and self._monotonic() - self._read_s < STALE_S

    def find(self, digest: str) -> StoredToken | None:
        """Return the valid token of a digest from memory, None if there is none."""
        return self._valid(self._tokens.get(digest))

    def get(self, token_id: str) -> StoredToken | None:
        """Return the valid token of an id from memory, None if there is none."""
        return self._valid(self._by_id.get(token_id))

    def is_valid(self, token_id: str) -> bool:
        """Return whether the token of an id counts now, as far as memory knows."""
        return self.get(token_id) is not None

    def look_up(self, digest: str) -> StoredToken | None:
        """Return the valid token of a digest from the store, None if there is none; raise the store's errors."""
        found = self._store.find_token(digest)
        parent = self._store.find_token(found.session_of) if found is not None and found.session_of else None
        with self._lock:
            if found is None:
                self._tokens.pop(digest, None)
            for one in (found, parent):
                if one is not None:
                    self._tokens[one.digest] = self._by_id[one.id] = one
        return self._valid(found)

    def put(self, token: StoredToken, audit: AuditRecord | None = None) -> None:
        """Store a new or changed token, with the audit line of the act; it counts at once."""
        self._store.put_token(token, () if audit is None else (audit,))
        with self._lock:
            self._tokens[token.digest] = self._by_id[token.id] = token
        self._subscribers.notify()

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return all tokens of the store, oldest first, ended ones as well."""
        return self._store.tokens()

    def prune_sessions(self) -> None:
        """Delete the sessions that have expired from the store."""
        self._store.prune_sessions(self._clock())

    def refresh(self) -> None:
        """Read what changed in the store; wake the subscribers if a token has changed or expired."""
        now_s = self._monotonic()
        with self._lock:
            known = dict(self._tokens)
        version = (self._store.token_version(), _num_expired(known, self._clock()))
        if version != self._version:
            tokens = {token.digest: token for token in self._store.tokens()}
            num_expired = _num_expired(tokens, self._clock())
            with self._lock:
                self._tokens, self._version = tokens, (version[0], num_expired)
                self._by_id = {token.id: token for token in tokens.values()}
            self._subscribers.notify()
        self._read_s = now_s

    def subscribe(self, callback: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `callback` after every change of a token until the context exits."""
        return self._subscribers.subscribe(callback)

    def _valid(self, token: StoredToken | None) -> StoredToken | None:
        """Return a token that counts now; a session counts as long as the token that signed in, with its grants."""
        if token is None or not token.is_valid(self._clock()):
            return None
        if not token.session_of:
            return token
        parent = self._tokens.get(token.session_of)
        if parent is None or not parent.is_valid(self._clock()):
            return None
        return token.model_copy(update={"high": parent.high}) if parent.high != token.high else token


def _num_expired(tokens: dict[str, StoredToken], now_s: float) -> int:
    return sum(not token.is_valid(now_s) for token in tokens.values())
