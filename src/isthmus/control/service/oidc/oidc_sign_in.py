"""`OidcSignIn`: begins a sign-in at the provider, and makes a session of the console of its answer.

Nothing is kept between the two: state, nonce and PKCE verifier follow from a random seed that only the browser has, in
a cookie that no script reads. So the answer counts in the browser that asked, at any server of the pool, and begun
sign-ins cost no memory. A person that signs in has one token in the store, of which the secret is not kept: it carries
the sessions, `isthmus token list` shows it, and to revoke it ends them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlencode

from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.console_sessions import SESSION_S, ConsoleSessions, NewSession
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.auth import Caller, token_digest
from isthmus.control.service.oidc.identity_token import Identity, check_identity_token
from isthmus.control.service.oidc.oidc_provider import OidcProvider
from isthmus.control.service.oidc.person_tokens import person_id, person_tokens
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.errors import AuthError, NotFoundError

SIGN_IN_S = 600.0
"""How long a person may take at the provider."""


class BegunSignIn(NamedTuple):
    """A sign-in that has begun: the seed for the browser's cookie, and the address to open."""

    seed: str
    url: str


class OidcSignIn:
    """Sign-ins by `provider`; None: the pool has none. `clock` returns seconds since the epoch."""

    def __init__(
        self,
        provider: OidcProvider | None,
        sessions: ConsoleSessions,
        registry: TokenRegistry,
        audit: AuditLog,
        clock: Callable[[], float],
    ) -> None:
        self._provider, self._sessions, self._registry = provider, sessions, registry
        self._audit, self._clock = audit, clock

    @property
    def issuer(self) -> str | None:
        """The address of the provider; None if the pool has none."""
        return self._provider.file.issuer if self._provider is not None else None

    def begin(self) -> BegunSignIn:
        """Return the address at the provider that a browser opens to sign in (RFC 6749, 4.1.1; RFC 7636, 4.3)."""
        provider, seed = self._require(), secrets.token_urlsafe(32)
        challenge = _encoded(hashlib.sha256(_derived(seed, "verifier").encode()).digest())
        fields = {
            "response_type": "code", "client_id": provider.file.client_id, "redirect_uri": provider.file.redirect_url,
            "scope": " ".join(provider.file.scopes), "state": _derived(seed, "state"), "nonce": _derived(seed, "nonce"),
            "code_challenge": challenge, "code_challenge_method": "S256",
        }  # fmt: skip
        endpoint = provider.authorization_endpoint()
        return BegunSignIn(seed, f"{endpoint}?{urlencode(fields)}")

    def finish(self, seed: str | None, state: str, code: str, address: str) -> NewSession:
        """Return a session for the person who has signed in; raise `AuthError` for an answer to no sign-in of here."""
        provider = self._require()
        if seed is None or not hmac.compare_digest(_derived(seed, "state").encode(), state.encode()):
            raise AuthError("this is the answer to no sign-in of this browser", hint="sign in again, in one window")
        token = provider.exchange(code, _derived(seed, "verifier"))
        found = check_identity_token(
            token, provider.file, _derived(seed, "nonce"), self._clock(), lambda fresh: provider.keys(fresh=fresh)
        )
        kept = self._token_of(found, provider.file.issuer)
        return self._sessions.start(Caller(role=found.role, name=found.name, token_id=kept.id, address=address))

    def refuse(self, address: str, error: AuthError) -> None:
        """Record an answer that was refused."""
        self._audit.record_stranger("refused", address, "oidc", error.message)

    def _token_of(self, found: Identity, issuer: str) -> StoredToken:
        """Return the token that carries the sessions of a person, prolonged; one of another role or name is ended."""
        known = person_tokens(self._registry, found, issuer, "oidc", self._clock())
        expires_s = self._clock() + SESSION_S
        kept = known[-1].model_copy(update={"expires_s": expires_s}) if known else None
        if kept is None:
            by, digest = person_id(found, issuer, "oidc"), token_digest(secrets.token_urlsafe(32))
            kept = StoredToken(
                role=found.role, name=found.name, digest=digest, created_s=self._clock(), expires_s=expires_s,
                created_by=by,
            )  # fmt: skip
        self._registry.put(kept)
        return kept

    def _require(self) -> OidcProvider:
        if self._provider is None:
            raise NotFoundError("this pool has no provider of sign-ins", hint="sign in with a token")
        return self._provider


def _derived(seed: str, what: str) -> str:
    """Return a value for one purpose from a seed; none tells another one (HKDF's step of expansion, RFC 5869)."""
    return _encoded(hmac.digest(seed.encode(), what.encode(), "sha256"))


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
