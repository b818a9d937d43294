"""`person_tokens`: the valid tokens of a person by sign-ins at the provider; those of another role or name end."""

from __future__ import annotations

import hashlib
from typing import Literal

from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.oidc.identity_token import Identity
from isthmus.control.store.store_interface import StoredToken

SignInKind = Literal["oidc", "oidc-command"]
"""`oidc` tokens carry sessions of the console, `oidc-command` ones are those of commands."""


def person_id(found: Identity, issuer: str, kind: SignInKind) -> str:
    """Return what a token of a person is `created_by`."""
    return f"{kind}-" + hashlib.sha256(f"{issuer}\n{found.subject}".encode()).hexdigest()[:32]


def person_tokens(
    registry: TokenRegistry, found: Identity, issuer: str, kind: SignInKind, now_s: float
) -> list[StoredToken]:
    """Return the tokens of a kind, oldest first; all of the person's with another role or name are ended."""
    kinds: tuple[SignInKind, ...] = ("oidc", "oidc-command")
    all_ids, mine = {person_id(found, issuer, one) for one in kinds}, person_id(found, issuer, kind)
    known = list[StoredToken]()
    for one in registry.tokens():
        if one.created_by not in all_ids or one.session_of or not one.is_valid(now_s):
            continue
        if (one.role, one.name) != (found.role, found.name):
            registry.put(one.model_copy(update={"revoked_s": now_s}))
        elif one.created_by == mine:
            known.append(one)
    return sorted(known, key=lambda one: one.created_s)
