"""`QuotaAccess`: sets the pool's accounts for an admin, and shows each caller its own."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.control.queries.accounts.quota_view import quota_view
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.auth import Caller
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import AccountsSet
from isthmus.core.errors import IsthmusError, NotFoundError
from isthmus.core.owner.accounts import Accounts
from isthmus.core.views.quota_views import AccountsView, QuotaView


class QuotaAccess:
    """Projects, groups and limits as callers may set and see them; `clock` counts from the epoch."""

    def __init__(self, actor: CoordinatorActor, audit: AuditLog, clock: Callable[[], float]) -> None:
        self._actor, self._audit, self._clock = actor, audit, clock

    def set(self, caller: Caller, accounts: Accounts) -> AccountsView:
        """Replace the pool's accounts; raises the errors of `admit_accounts`."""
        event = AccountsSet(now_s=self._clock(), by=caller.name, accounts=accounts)
        found = AccountsView(
            projects=len(accounts.projects),
            groups=len(accounts.groups),
            users=len(accounts.users),
            accepted_s=event.now_s,
        )
        counts = f"{found.projects} projects, {found.groups} groups, {found.users} users"
        line = self._audit.line("quotas-set", caller, "", counts)
        try:
            self._actor.propose(lambda _: event, lambda _: None, line)
        except IsthmusError as error:
            self._audit.record("refused", caller, "quotas", error.message)
            raise
        return found

    def show(self, caller: Caller, account: str | None = None) -> QuotaView:
        """Return the accounts that the caller may see, or one of them; raise `NotFoundError` for one that is not."""
        user = None if caller.role == "admin" else caller.name
        now_s = self._clock()
        found = self._actor.query(lambda coordinator: quota_view(coordinator.state, now_s, user, account))
        if account is not None and not found.rows:
            raise NotFoundError(f"no account '{account}'", hint="isthmus quota show lists those that you may see")
        return found
