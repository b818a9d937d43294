"""`QuotaAccess`: sets the pool's accounts for an admin, an owner's projects for it, and shows each caller its own."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.queries.accounts.quota_view import quota_view
from isthmus.control.service.access.audit_log import AuditLog
from isthmus.control.service.auth import Caller
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import AccountsSet
from isthmus.core.errors import AuthError, IsthmusError, NotFoundError
from isthmus.core.owner.accounts import Accounts
from isthmus.core.owner.own_quota import own_quota
from isthmus.core.owner.with_quota import QuotaChange, with_quota
from isthmus.core.views.quota_views import AccountsView, QuotaView

_KINDS = ("projects", "groups", "users")


class QuotaAccess:
    """Projects, groups and limits as callers may set and see them; `clock` counts from the epoch."""

    def __init__(self, actor: CoordinatorActor, audit: AuditLog, clock: Callable[[], float]) -> None:
        self._actor, self._audit, self._clock = actor, audit, clock

    def set(self, caller: Caller, accounts: Accounts) -> AccountsView:
        """Replace the pool's accounts; raises the errors of `admit_accounts`."""
        now_s, counts = self._clock(), {kind: len(getattr(accounts, kind)) for kind in _KINDS}
        text = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        self._propose(caller, lambda _: accounts, now_s, "", text)
        return AccountsView(**counts, accepted_s=now_s)

    def set_quota(self, caller: Caller, account: str, change: QuotaChange) -> QuotaView:
        """Replace the quota of one account, for an owner as far as its clusters go.

        Raises the errors of `own_quota`, `with_quota` and `admit_accounts`.
        """
        _require_person(caller)

        def changed(coordinator: Coordinator) -> Accounts:
            state, wanted = coordinator.state, change
            if caller.role != "admin":
                own = {name for name, record in state.clusters.items() if record.cluster.owner == caller.name}
                wanted = own_quota(state.accounts.accounts, account, change, caller.name, own)
            return with_quota(state.accounts.accounts, account, wanted)

        self._propose(caller, changed, self._clock(), account, _as_text(change))
        return self._view(caller, account)

    def _propose(
        self, caller: Caller, accounts_of: Callable[[Coordinator], Accounts], now_s: float, subject: str, text: str
    ) -> None:
        """Put accounts into effect, with a line of the audit log, also for a refusal."""
        line = self._audit.line("quotas-set", caller, subject, text)
        try:
            self._actor.propose(
                lambda coordinator: AccountsSet(
                    now_s=now_s, by=caller.name, accounts=accounts_of(coordinator), ranks_waiting=True
                ),
                lambda _: None, line,
            )  # fmt: skip
        except IsthmusError as error:
            self._audit.record("refused", caller, f"quotas {subject}".strip(), error.message)
            raise

    def show(self, caller: Caller, account: str | None = None) -> QuotaView:
        """Return the accounts that the caller may see, or one of them.

        Raises `NotFoundError` for one that it may not see, `AuthError` for the key of an agent.
        """
        _require_person(caller)
        found = self._view(caller, account)
        if account is not None and not found.rows:
            raise NotFoundError(f"no account '{account}'", hint="isthmus quota show lists those that you may see")
        return found

    def _view(self, caller: Caller, account: str | None) -> QuotaView:
        user, owner = (caller.name if caller.role == role else None for role in ("user", "owner"))
        now_s = self._clock()
        return self._actor.query(lambda coordinator: quota_view(coordinator.state, now_s, user, account, owner=owner))


def _require_person(caller: Caller) -> None:
    if caller.site:
        raise AuthError("the key of an agent is not for quotas", hint="use the owner's token")


def _as_text(change: QuotaChange) -> str:
    """Return a quota as a line of the audit log."""
    named = change.model_dump(mode="json", exclude_none=True, exclude={"chips_at", "guaranteed_at"})
    for name in ("chips_at", "guaranteed_at"):
        lines = getattr(change, name) or ()
        named |= {name: " ".join(f"{line.scope}={line.chips}" for line in lines)} if lines else {}
    return ", ".join(f"{name} {value}" for name, value in named.items()) or "no limits"
