"""`quota_view`: accounts with their limits and what they hold and have used; each caller's own, or all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice

from isthmus.control.accounts.account_book import MS_PER_HOUR, AccountUse
from isthmus.control.accounts.account_tree import PROJECT_PREFIX, USER_PREFIX
from isthmus.control.state.job_records import PoolState
from isthmus.core.owner.accounts import GROUP_PREFIX
from isthmus.core.owner.chip_scope import ChipScope
from isthmus.core.views.quota_views import QuotaPlace, QuotaRow, QuotaView

MAX_ROWS, MAX_JOBS = 1_000, 50
"""Accounts of an answer, and jobs of an account."""
_KINDS = {USER_PREFIX: "user", GROUP_PREFIX: "group", PROJECT_PREFIX: "project"}


def quota_view(
    state: PoolState, now_s: float, user: str | None, only: str | None = None, *, owner: str | None = None
) -> QuotaView:
    """Return the accounts of a user, or of an owner, else all; `only` names one account.

    A user sees its groups and its projects with those above and below them, and of their jobs its own; an owner its
    projects. What is held now
    counts up to now; what it costs, up to the last event of each job.
    """
    names = _visible(state, user, owner)
    wanted = [name for name in names if only in (None, name)]
    jobs: dict[str, list[str]] = {name: [] for name in wanted[:MAX_ROWS]}
    for job in state.live_jobs.values():
        if job.charged_chips and user in (None, job.user):
            for account in state.accounts.tree.accounts_of(job.user, job.project):
                if account in jobs and len(jobs[account]) < MAX_JOBS:
                    jobs[account].append(job.id)
    now_ms = max(state.meter.now_ms, int(now_s * 1000))
    return QuotaView(
        now_s=now_s,
        month=f"{datetime.fromtimestamp(now_ms / 1000, UTC):%Y-%m}",
        currency=state.meter.prices.currency,
        require_project=state.accounts.accounts.require_project,
        rows=tuple(_row(state, name, now_ms, held) for name, held in jobs.items()),
        more=len(wanted) > MAX_ROWS,
    )


def _visible(state: PoolState, user: str | None, owner: str | None) -> list[str]:
    """Return the accounts that a caller may see: projects in the order of the file, then groups, then users."""
    tree, use = state.accounts.tree, state.accounts.use
    if owner is not None:
        return [PROJECT_PREFIX + one.name for one in tree.accounts.projects if one.owner == owner]
    if user is not None:
        own = tree.projects_of(user)
        seen = {one for name in own for one in (*tree.chain(name), *tree.below(name))}
        groups = (one for one in tree.accounts_of(user, "") if one.startswith(GROUP_PREFIX))
        return [*(PROJECT_PREFIX + one for one in tree.projects if one in seen), *groups, USER_PREFIX + user]
    projects = (PROJECT_PREFIX + one for one in tree.projects)
    groups = (GROUP_PREFIX + one.name for one in tree.accounts.groups)
    limited = (USER_PREFIX + one.name for one in tree.accounts.users)
    counted = _names(use, lambda name: name.startswith(USER_PREFIX))
    return list(dict.fromkeys([*projects, *groups, *limited, *counted]))


def _names(names: Iterable[str], is_wanted: Callable[[str], bool]) -> Iterable[str]:
    return islice(sorted(filter(is_wanted, names)), MAX_ROWS + 1)


def _row(state: PoolState, account: str, now_ms: int, jobs: Iterable[str]) -> QuotaRow:
    tree, use, capped = state.accounts.tree, state.accounts.use_of(account), state.indexes.capped
    limits, (prefix, name) = tree.limits(account), (account.partition(":")[0] + ":", account.partition(":")[2])
    project = tree.projects.get(name) if prefix == PROJECT_PREFIX else None
    this_month = now_ms < use.month_end_ms
    begin_ms = use.at_ms if this_month else max(use.at_ms, use.month_end_ms)
    chip_ms = (use.chip_ms if this_month else 0) + use.num_chips * max(0, now_ms - begin_ms)
    return QuotaRow.model_validate(
        {
            "kind": _KINDS[prefix],
            "name": name,
            "parent": project.parent if project else None,
            "owner": project.owner if project else None,
            "priority": project.priority if project else None,
            "weight": project.weight if project else None,
            "guaranteed_chips": project.guaranteed_chips if project else 0,
            "max_chips": limits.chips,
            "num_chips": use.num_chips,
            "num_jobs": use.num_jobs,
            "max_chip_hours": limits.chip_hours_per_month,
            "chip_hours": chip_ms / MS_PER_HOUR,
            "max_spend_millionths": limits.spend_millionths,
            "spend_millionths": use.millionths if this_month else 0,
            "percent": use.percent,
            "num_capped": len(capped.get(account, ())) + len(capped.get(f"above:{account}", ())),
            "places": _places(project.guarantees if project else {}, limits.on_chips, use),
            "jobs": tuple(jobs),
        }
    )


def _places(
    guarantees: Mapping[ChipScope, int], limits: Mapping[ChipScope, int], use: AccountUse
) -> tuple[QuotaPlace, ...]:
    return tuple(
        QuotaPlace(
            cluster=scope.cluster,
            node_group=scope.node_group or None,
            guaranteed_chips=guarantees.get(scope, 0),
            max_chips=limits.get(scope),
            num_chips=use.chips_in(scope),
        )
        for scope in sorted({*guarantees, *limits})
        if scope.cluster
    )
