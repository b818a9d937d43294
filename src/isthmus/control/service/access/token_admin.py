"""`TokenAdmin`: lists, creates, revokes and rotates tokens; each act is in the audit log."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.auth import Caller, token_digest
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.views.access_views import AuditRecord, TokenGrant, TokenInfo, TokenRotation
from isthmus.core.views.api_views import TokenRequest, TokenView

MAX_TOKENS_OF_A_NAME = 100
"""Valid tokens of one role and name."""


class TokenAdmin:
    """Acts on the tokens of `registry` for a caller: an admin on all, others on those of their role and name."""

    def __init__(self, registry: TokenRegistry, audit: AuditLog, clock: Callable[[], float]) -> None:
        self._registry, self._audit, self._clock = registry, audit, clock

    def list(self, caller: Caller) -> tuple[TokenInfo, ...]:
        """Return the tokens that `caller` may see, oldest first."""
        now_s = self._clock()
        return tuple(_info(token, now_s) for token in self._registry.tokens() if _may_see(caller, token))

    def create(self, caller: Caller, request: TokenRequest) -> TokenView:
        """Create a token; only the returned view contains it."""
        now_s = self._clock()
        expires_s = None if request.expires_in_s is None else now_s + request.expires_in_s
        detail = f"{request.role} {request.name}{_until(expires_s, now_s)}"
        return self._make(
            caller,
            request.role,
            request.name,
            expires_s,
            lambda new: self._audit.line("token-created", caller, new, detail),
        )

    def revoke(self, caller: Caller, token_id: str) -> TokenInfo:
        """Revoke a token, which is rejected from now on; raise `NotFoundError` for an unknown one."""
        token, now_s = self._find(caller, token_id), self._clock()
        if token.is_valid(now_s):
            if token.role == "admin" and not token.session_of and not self._other_admin(token, now_s):
                raise ConflictError(
                    f"{token_id} is the last valid token of an admin",
                    hint="create another one first: isthmus token create --admin NAME",
                )
            token = token.model_copy(update={"revoked_s": now_s})
            line = self._audit.line("token-revoked", caller, token_id, f"{token.role} {token.name}")
            self._registry.put(token, line)
        return _info(token, now_s)

    def grant(self, caller: Caller, token_id: str, grant: TokenGrant) -> TokenInfo:
        """Grant priority `high` to a user's token, or take it back; jobs that were submitted keep theirs.

        Raises `NotFoundError` for an unknown token and `ConflictError` for one that no jobs are submitted with.
        """
        token, now_s = self._find(caller, token_id), self._clock()
        if token.role != "user" or token.session_of:
            raise ConflictError(
                f"{token_id} is a {_kind(token)} of {token.role} {token.name}: priority 'high' is granted to users' "
                "tokens",
                hint="`isthmus token list` shows the role of each token",
            )
        if token.high != grant.high:
            token = token.model_copy(update={"high": grant.high})
            act = "high-priority-granted" if grant.high else "high-priority-withdrawn"
            self._registry.put(token, self._audit.line(act, caller, token_id, f"{token.role} {token.name}"))
        return _info(token, now_s)

    def rotate(self, caller: Caller, token_id: str, rotation: TokenRotation) -> TokenView:
        """Replace a valid token by a new one; the old one counts for `grace_s` more.

        The new one of an admin's rotation lasts as long as the old one did in all. Any other one expires with the
        old one: a stolen token cannot extend itself.
        """
        old, now_s = self._find(caller, token_id), self._clock()
        if old.site or old.role == "joiner" or old.session_of:
            raise ConflictError(
                f"{token_id} is a session, an invitation, or the key of a site's agent, which renews it by itself",
                hint=f"isthmus token revoke {token_id} ends it",
            )
        if not old.is_valid(now_s):
            raise ConflictError(f"{token_id} does not count any more", hint="an admin creates a new one")
        expires_s = old.expires_s
        if expires_s is not None and caller.role == "admin":
            expires_s = now_s + expires_s - old.created_s
        end_s = now_s + rotation.grace_s
        ends_s = end_s if old.expires_s is None else min(end_s, old.expires_s)
        made = self._make(
            caller, old.role, old.name, expires_s, high=old.high, line=lambda new: self._audit.line(
                "token-rotated", caller, token_id, f"replaced by {new}{_until(ends_s, now_s)}"
            ),
        )  # fmt: skip
        self._registry.put(old.model_copy(update={"expires_s": ends_s}))
        return made

    def _make(
        self, caller: Caller, role: str, name: str, expires_s: float | None, line: Callable[[str], AuditRecord],
        *, high: bool = False,
    ) -> TokenView:  # fmt: skip
        """Create a token; `line` makes the audit line from its id."""
        now_s = self._clock()
        valid = [
            one
            for one in self._registry.tokens()
            if (one.role, one.name) == (role, name) and one.is_valid(now_s) and not one.session_of
        ]
        if len(valid) >= MAX_TOKENS_OF_A_NAME:
            raise ConflictError(
                f"{role} {name} has {len(valid)} valid tokens, the most that a name may have",
                hint="revoke some: isthmus token list, isthmus token revoke ID",
            )
        token = secrets.token_urlsafe(32)
        stored = StoredToken(
            role=role, name=name, digest=token_digest(token), created_s=now_s, expires_s=expires_s,
            created_by=caller.name, high=high,
        )  # fmt: skip
        self._registry.put(stored, line(stored.id))
        return TokenView.model_validate(
            {"role": role, "name": name, "token": token, "id": stored.id, "expires_s": expires_s}
        )

    def _find(self, caller: Caller, token_id: str) -> StoredToken:
        for token in self._registry.tokens():
            if token.id == token_id and _may_see(caller, token):
                return token
        raise NotFoundError(f"no token '{token_id[:40]}'", hint="`isthmus token list` lists them")

    def _other_admin(self, token: StoredToken, now_s: float) -> bool:
        return any(
            one.role == "admin" and not one.session_of and one.is_valid(now_s) and one.digest != token.digest
            for one in self._registry.tokens()
        )


def _may_see(caller: Caller, token: StoredToken) -> bool:
    if caller.role == "admin":
        return True
    return (caller.role, caller.name) == (token.role, token.name) and caller.site in ("", token.site)


def _info(token: StoredToken, now_s: float) -> TokenInfo:
    ended = "revoked" if token.revoked_s is not None else "expired"
    state = "valid" if token.is_valid(now_s) else ended
    fields = token.model_dump(exclude={"digest", "replaces", "session_of"})
    if token.session_of:
        fields["session_of"] = f"t-{token.session_of[:12]}"
    return TokenInfo.model_validate(fields | {"id": token.id, "state": state})


def _kind(token: StoredToken) -> str:
    return "session" if token.session_of else "token"


def _until(expires_s: float | None, now_s: float) -> str:
    return "" if expires_s is None else f", counts for {expires_s - now_s:.0f} s more"
