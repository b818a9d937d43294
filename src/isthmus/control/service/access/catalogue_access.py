"""`CatalogueAccess`: the catalogue as callers may see and change it. A user changes its own entries only."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.catalogue.catalogue_versions import (
    entry_view,
    list_entries,
    no_entry,
    ordered_version,
    require_entry,
    require_version,
)
from isthmus.control.queries.quotas import Quotas, check_catalogue_quota
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.auth import Caller, require_role
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import EntryGranted, Event, VersionAdded, VersionRemoved
from isthmus.core.catalogue import CopyKey, EntryKind, FileManifest
from isthmus.core.errors import AuthError, TooLargeError
from isthmus.core.views.access_views import AuditRecord
from isthmus.core.views.catalogue_views import EntryView, GrantChange, VersionAddition

MAX_MODEL_BYTES = 256 << 10
"""Largest configuration of a model in the catalogue."""


class CatalogueAccess:
    """Reads and changes of the catalogue for callers; `quotas` limit what users other than admins add."""

    def __init__(
        self, actor: CoordinatorActor, audit: AuditLog, clock: Callable[[], float], quotas: Quotas | None = None
    ) -> None:
        self._actor, self._audit, self._clock, self._quotas = actor, audit, clock, quotas

    def list(self, caller: Caller, kind: EntryKind) -> tuple[EntryView, ...]:
        """Return the entries of a kind that the caller owns or was granted (an admin: all)."""
        user = _viewer(caller)
        return self._actor.query(lambda coordinator: list_entries(coordinator.state, user, kind))

    def entry(self, caller: Caller, kind: EntryKind, owner: str, name: str) -> EntryView:
        """Return an entry; raise `NotFoundError` for one that the caller may not see."""
        user = _viewer(caller)

        def ask(coordinator: Coordinator) -> EntryView | None:
            known = coordinator.state.catalogue.get((kind, owner, name))
            if known is not None and not known.admits(user):
                return None
            return entry_view(coordinator.state, require_entry(coordinator.state, user, kind, owner, name), user)

        found = self._actor.query(ask)
        if found is None:
            self._audit.record("refused", caller, f"{owner}/{name}", f"{kind} of another user")
            raise no_entry(kind, owner, name)
        return found

    def manifest(self, caller: Caller, kind: EntryKind, owner: str, name: str, version: str | None) -> FileManifest:
        """Return the files of a version (None: the newest); raise `NotFoundError` like `entry`."""
        self.entry(caller, kind, owner, name)
        user = _viewer(caller)

        def ask(coordinator: Coordinator) -> FileManifest:
            return require_version(require_entry(coordinator.state, user, kind, owner, name), version).manifest

        return self._actor.query(ask)

    def add(self, caller: Caller, addition: VersionAddition) -> EntryView:
        """Add a version to an entry of the caller; raise `QuotaError` or `TooLargeError` beyond the quotas."""
        require_role(caller, "user")
        if addition.model is not None and len(addition.model.model_dump_json()) > MAX_MODEL_BYTES:
            raise TooLargeError(f"the configuration of a model has at most {MAX_MODEL_BYTES} bytes")
        event = VersionAdded(
            now_s=self._clock(),
            entry_kind=addition.kind,
            owner=caller.name,
            name=addition.name,
            source=addition.source,
            manifest=addition.manifest,
            model=addition.model,
        )

        def propose(coordinator: Coordinator) -> Event:
            known = coordinator.state.catalogue.get((addition.kind, caller.name, addition.name))
            is_new = known is None or addition.manifest.version not in known.versions
            if self._quotas is not None and caller.role != "admin" and is_new:
                check_catalogue_quota(self._quotas, coordinator.state, caller.name, len(addition.manifest.files))
            return event

        line = self._audit.line("version-added", caller, f"{caller.name}/{addition.name}", addition.manifest.version)
        return self._changed(propose, caller, addition.kind, caller.name, addition.name, line)

    def grant(self, caller: Caller, kind: EntryKind, owner: str, name: str, change: GrantChange) -> EntryView:
        """Grant an entry of the caller to a user, or take the grant back; an admin may do it for its owner."""
        self._require_own(caller, kind, owner, name)
        event = EntryGranted(
            now_s=self._clock(), entry_kind=kind, owner=owner, name=name, user=change.user, granted=change.granted
        )
        act = "entry-granted" if change.granted else "grant-revoked"
        line = self._audit.line(act, caller, f"{owner}/{name}", f"to {change.user}")
        return self._changed(lambda _: event, caller, kind, owner, name, line)

    def remove(self, caller: Caller, kind: EntryKind, owner: str, name: str, version: str | None) -> None:
        """Remove a version of an entry of the caller, or with None the entry; an admin may do it for its owner."""
        self._require_own(caller, kind, owner, name)

        def propose(coordinator: Coordinator) -> Event:
            entry = require_entry(coordinator.state, None, kind, owner, name)
            full = None if version is None else require_version(entry, version).version
            return VersionRemoved(now_s=self._clock(), entry_kind=kind, owner=owner, name=name, version=full)

        line = self._audit.line("version-removed", caller, f"{owner}/{name}", version or "all versions")
        self._actor.propose(propose, lambda _: None, line)

    def ordered_manifest(self, cluster: str, key: CopyKey) -> FileManifest:
        """Return the manifest of a version that a part at `cluster` needs; raise `NotFoundError` for any other."""
        return self._actor.query(lambda coordinator: ordered_version(coordinator.state, cluster, key).manifest)

    def _changed(
        self,
        propose: Callable[[Coordinator], Event],
        caller: Caller,
        kind: EntryKind,
        owner: str,
        name: str,
        line: AuditRecord,
    ) -> EntryView:
        user = _viewer(caller)

        def answer(coordinator: Coordinator) -> EntryView:
            return entry_view(coordinator.state, require_entry(coordinator.state, user, kind, owner, name), user)

        return self._actor.propose(propose, answer, line)

    def _require_own(self, caller: Caller, kind: EntryKind, owner: str, name: str) -> None:
        """Raise `NotFoundError` unless the caller may see the entry, `AuthError` if it may see it only."""
        self.entry(caller, kind, owner, name)
        if caller.role != "admin" and caller.name != owner:
            raise AuthError(
                f"{owner}/{name} belongs to user '{owner}'", hint=f"ask {owner}; a grant lets you use it, not change it"
            )


def _viewer(caller: Caller) -> str | None:
    """Return the user whose entries the caller sees; None for an admin, who sees all."""
    require_role(caller, "user")
    return None if caller.role == "admin" else caller.name
