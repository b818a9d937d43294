"""`SiteKeys`: invitations of owners, and the keys of the agents that join by them.

An invitation's code is a token that joins one cluster and does nothing else. The agent draws its own keys and sends
their digests alone, so a lost answer loses no key: the same request is repeated. A new key takes the place of the old
one when it is used for the first time; of a site at most two count.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Iterator

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.access.token_registry import TokenRegistry
from isthmus.control.service.auth import Caller, token_digest
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import InvitationRevoked, SiteInvited, SiteJoined
from isthmus.control.store.store_interface import StoredToken
from isthmus.core.errors import AuthError, ConflictError
from isthmus.core.views.site_views import (
    KEY_LIFE_S,
    InvitationRequest,
    InvitationView,
    InvitationWithCode,
    JoinedView,
    JoinRequest,
    KeyRequest,
)

CODE_BYTES = 16
"""Random bytes of a code: 128 bits cannot be guessed, and are 26 letters and digits."""


class SiteKeys:
    """Acts on the tokens of `registry` and on the invitations of the pool; `clock` counts from the epoch."""

    def __init__(
        self, actor: CoordinatorActor, registry: TokenRegistry, audit: AuditLog, clock: Callable[[], float]
    ) -> None:
        self._actor, self._registry, self._audit, self._clock = actor, registry, audit, clock

    def invite(self, caller: Caller, request: InvitationRequest) -> InvitationWithCode:
        """Make an invitation; only the returned view has its code. Raises the errors of `admit_invitation`."""
        now_s, code = self._clock(), base64.b32encode(secrets.token_bytes(CODE_BYTES)).decode().rstrip("=")
        token = StoredToken(
            role="joiner", name=request.owner, digest=token_digest(code), created_s=now_s,
            expires_s=now_s + request.expires_in_s, created_by=caller.name,
        )  # fmt: skip
        event = SiteInvited(
            now_s=now_s, id=token.id, owner=request.owner, by=caller.name, expires_s=now_s + request.expires_in_s,
            cluster=request.cluster, max_chips=request.max_chips, probation=request.probation,
        )  # fmt: skip
        line = self._audit.line("site-invited", caller, token.id, _terms(request))
        self._actor.propose(lambda _: event, lambda _: None, line)
        self._registry.put(token)
        return InvitationWithCode(code=code, **self._view_of(token.id).model_dump())

    def invitations(self) -> tuple[InvitationView, ...]:
        """Return all invitations that the state keeps, oldest first."""
        return self._actor.query(lambda coordinator: tuple(_views(coordinator, self._clock())))

    def revoke_invitation(self, token_id: str) -> None:
        """End the invitation of a token that was revoked, if it has one."""
        event = InvitationRevoked(now_s=self._clock(), id=token_id)
        self._actor.propose(lambda _: event, lambda _: None)

    def join(self, caller: Caller, request: JoinRequest) -> JoinedView:
        """Join a cluster by the caller's invitation, and accept the first key of its agent.

        Repeating it with the same key returns the same. Raises the errors of `admit_join`, and `ConflictError` for a
        key that is another token.
        """
        now_s, cluster = self._clock(), request.cluster
        event = SiteJoined(now_s=now_s, invitation=caller.token_id, cluster=cluster, key=request.key)
        self._actor.propose(lambda _: event, lambda _: None)
        known = self._known(request.key, cluster.name)
        if known is None:
            self._end_keys(cluster.name)
            known = self._add_key(caller, "site-joined", cluster.owner, cluster.name, request.key)
        on_probation = self._actor.query(lambda c: c.state.clusters[cluster.name].probation is not None)
        return JoinedView(site=cluster.name, owner=cluster.owner, key_id=known.id, probation=on_probation)

    def renew(self, caller: Caller, cluster: str, request: KeyRequest) -> JoinedView:
        """Accept the next key of a site's agent; the present one counts until the next one is used.

        A next key that was not used is replaced. Raises `AuthError` for a token that is no key of the site.
        """
        self._require_key(caller, cluster)
        known = self._known(request.key, cluster)
        if known is None:
            for one in self._keys(cluster):
                if one.replaces == caller.token_id:
                    self._end(one)
            known = self._add_key(caller, "key-renewed", caller.name, cluster, request.key, replaces=caller.token_id)
        return JoinedView(site=cluster, owner=caller.name, key_id=known.id)

    def note_use(self, caller: Caller) -> None:
        """End the key that the caller's one replaces, which has been used now."""
        if caller.replaces and self._registry.is_valid(caller.replaces):
            for one in self._keys(caller.site):
                if one.id == caller.replaces:
                    self._end(one)

    def end_keys_of(self, cluster: str) -> tuple[str, ...]:
        """End every key of a site that leaves; return their ids."""
        return tuple(self._end_keys(cluster))

    def key_ids(self, cluster: str) -> tuple[str, ...]:
        """Return the ids of the keys of a site that count."""
        return tuple(one.id for one in self._keys(cluster))

    def _require_key(self, caller: Caller, cluster: str) -> None:
        if caller.site != cluster:
            raise AuthError(
                f"{caller.token_id} is no key of cluster '{cluster}'",
                hint="agents that have joined by a code renew their keys; other tokens: isthmus token rotate",
            )

    def _known(self, digest: str, cluster: str) -> StoredToken | None:
        """Return the key of a digest if it is one of this site; raise `ConflictError` for any other token."""
        found = self._registry.look_up(digest)
        if found is None and all(one.digest != digest for one in self._registry.tokens()):
            return None
        if found is None or found.site != cluster:
            raise ConflictError("this key cannot be used", hint="draw another one: start with an empty state folder")
        return found

    def _add_key(
        self, caller: Caller, act: str, owner: str, cluster: str, digest: str, replaces: str = ""
    ) -> StoredToken:
        now_s = self._clock()
        made = StoredToken(
            role="owner", name=owner, digest=digest, created_s=now_s, expires_s=now_s + KEY_LIFE_S,
            created_by=f"agent of {cluster}", site=cluster, replaces=replaces,
        )  # fmt: skip
        detail = f"{made.id} replaces {replaces}" if replaces else f"owner {owner}, key {made.id}"
        self._registry.put(made, self._audit.line(act, caller, cluster, detail))
        return made

    def _keys(self, cluster: str) -> list[StoredToken]:
        now_s = self._clock()
        return [one for one in self._registry.tokens() if one.site == cluster and one.is_valid(now_s)]

    def _end_keys(self, cluster: str) -> Iterator[str]:
        ended = [self._end(one) for one in self._keys(cluster)]
        return iter(ended)

    def _end(self, key: StoredToken) -> str:
        self._registry.put(key.model_copy(update={"revoked_s": self._clock()}))
        return key.id

    def _view_of(self, invitation: str) -> InvitationView:
        return next(one for one in self.invitations() if one.id == invitation)


def _views(coordinator: Coordinator, now_s: float) -> Iterator[InvitationView]:
    for key, one in coordinator.state.invitations.items():
        ended = "revoked" if one.revoked else ("expired" if now_s >= one.expires_s else "open")
        yield InvitationView.model_validate(
            {
                "id": key, "owner": one.owner, "cluster": one.cluster, "max_chips": one.max_chips, "by": one.by,
                "probation": one.probation, "made_s": one.made_s, "expires_s": one.expires_s,
                "state": "used" if one.joined else ended, "joined": one.joined,
            }
        )  # fmt: skip


def _terms(request: InvitationRequest) -> str:
    terms = [f"owner {request.owner}", f"within {request.expires_in_s:g} s"]
    terms += [f"cluster {request.cluster}"] if request.cluster else []
    terms += [f"at most {request.max_chips} chips"] if request.max_chips else []
    return ", ".join([*terms, "on probation" if request.probation else "without probation"])
