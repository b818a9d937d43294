"""Accounts that the operator sets: their check against what runs, and their effect on jobs and the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

from isthmus.control.accounts.account_book import MS_PER_HOUR
from isthmus.control.accounts.account_tree import AccountTree
from isthmus.control.coordinator.plan_requests import is_plan_requested, request_plans
from isthmus.control.queries.accounts.limit_refusals import account_text, max_chips_of
from isthmus.control.state.events import AccountsSet
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState
from isthmus.control.state.update_indexes import job_at_key, uncap
from isthmus.core.errors import ConflictError
from isthmus.core.owner.accounts import Limits
from isthmus.core.owner.check_accounts import check_accounts

MAX_NAMED_JOBS = 5
"""Jobs that a refusal names."""


def admit_accounts(state: PoolState, event: AccountsSet) -> bool:
    """Return whether the accounts differ from those in effect.

    Raises `FieldError` for accounts that contradict themselves, and `ConflictError` for a limit below what runs, with
    the time at which it would hold, and for a project that is left out and has jobs.
    """
    check_accounts(event.accounts)
    if event.accounts == state.accounts.accounts:
        return False
    tree = AccountTree(event.accounts)
    gone = Counter(job.project for job in state.live_jobs.values() if job.project and job.project not in tree.projects)
    if gone:
        name, number = min(gone.items())
        raise ConflictError(
            f"project '{name}' is left out, but {number} of its jobs have not ended",
            hint=f"cancel them or wait: isthmus quota show --project {name}",
        )
    holders: dict[str, list[JobRecord]] = {}
    for job in state.live_jobs.values():
        for account in tree.accounts_of(job.user, job.project) if job.charged_chips else ():
            holders.setdefault(account, []).append(job)
    for account, limits in tree.limited():
        if account in holders:
            _check_limits(state, account, limits, holders[account], event.now_s)
    return True


def replace_accounts(state: PoolState, event: AccountsSet) -> None:
    """Put the accounts into effect: what jobs hold counts to them, and jobs that a limit kept out are tried again."""
    book, now_ms = state.accounts, state.meter.now_ms
    book.clear_holdings(now_ms)
    book.accounts = event.accounts
    for job in state.live_jobs.values():
        if job.charged_chips:
            book.hold(book.tree.accounts_of(job.user, job.project), job.charged_chips, 1, now_ms)
    state.shares.project_weights = book.tree.shares()
    for keys in [tuple(one) for one in state.indexes.capped.values()]:
        for key in keys:
            uncap(state, job_at_key(state, key))
    for job in state.live_jobs.values():
        most = max_chips_of(state, job)
        replans = job.state in WAITING_STATES and job.auto_plan and not job.plan_fixed
        if replans and most is not None and job.num_chips > most and not is_plan_requested(state, job):
            request_plans(state, job)
    state.indexes.capacity_freed = True


def _check_limits(state: PoolState, account: str, limits: Limits, holders: list[JobRecord], now_s: float) -> None:
    held, name = sum(job.charged_chips for job in holders), account_text(account)
    if limits.chips is not None and held > limits.chips:
        raise ConflictError(
            f"{name} holds {held} chips now, more than {limits.chips}; {_when(holders, held - limits.chips, now_s)}",
            hint=f"set it then, or end jobs first; they hold chips: {_named(holders)}",
        )
    use = state.accounts.use_of(account)
    now_ms = max(state.meter.now_ms, int(now_s * 1000))
    if not use.month_end_ms or now_ms >= use.month_end_ms:
        return
    next_month = _utc(use.month_end_ms / 1000)
    used_h = (use.chip_ms + use.num_chips * max(0, now_ms - use.at_ms)) / MS_PER_HOUR
    if limits.chip_hours_per_month is not None and used_h > limits.chip_hours_per_month:
        raise ConflictError(
            f"{name} has used {used_h:,.1f} chip-hours this month, more than {limits.chip_hours_per_month:,}, and its "
            f"jobs run; it would hold from {next_month} on",
            hint=f"set it then, or end jobs first; they hold chips: {_named(holders)}",
        )
    spend = limits.spend_millionths
    if spend is not None and use.millionths > spend:
        raise ConflictError(
            f"{name} has spent {use.millionths / 1e6:,.2f} this month, more than {spend / 1e6:,.2f}, and its jobs run; "
            f"it would hold from {next_month} on",
            hint=f"set it then, or end jobs first; they hold chips: {_named(holders)}",
        )


def _when(holders: list[JobRecord], excess: int, now_s: float) -> str:
    """Say when jobs that hold `excess` chips will have ended."""
    for end_s, job in sorted(_ends(holders, now_s), key=lambda one: (one[0], one[1].number)):
        excess -= job.charged_chips
        if excess <= 0:
            return f"it would hold at {_utc(end_s)}, when {job.id} should have ended"
    return "when it would hold is not known: not all of its jobs have a predicted end"


def _ends(holders: list[JobRecord], now_s: float) -> Iterator[tuple[float, JobRecord]]:
    for job in holders:
        if job.expected_end_s is not None:
            yield max(now_s, job.expected_end_s), job


def _named(holders: list[JobRecord]) -> str:
    names = [f"{job.id} ({job.charged_chips})" for job in holders[:MAX_NAMED_JOBS]]
    more = len(holders) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _utc(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
