"""The levels of budgets, 0, 80 or 100 percent: of what accounts have used of a month, and of what jobs may cost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from isthmus.control.accounting.book_usage import accrued
from isthmus.control.accounting.holdings import JobMeter
from isthmus.control.accounting.ledger import job_account
from isthmus.control.accounts.account_book import FULL_PERCENT, MS_PER_HOUR, WARN_PERCENT, AccountUse
from isthmus.control.state.events import BudgetsDue
from isthmus.control.state.job_records import PoolState
from isthmus.core.owner.accounts import Limits

SCAN_MS = 1_000
"""Least time between two looks at all budgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLevels:
    """The level of each account with a limit on a month, and of each job that holds chips and has a `max_price`."""

    accounts: dict[str, int] = field(default_factory=dict)
    jobs: dict[str, int] = field(default_factory=dict)


def budget_levels(state: PoolState, now_ms: int) -> BudgetLevels:
    """Return the levels at `now_ms`, with what is held now and not booked yet."""
    tree, prices, ledger = state.accounts.tree, state.meter.prices, state.meter.ledger
    unbooked: defaultdict[str, int] = defaultdict(int)
    jobs = dict[str, int]()
    for job_id, metered in state.meter.jobs.items():
        job = state.jobs.get(job_id)
        limit = job.max_price_millionths if job is not None else None
        if not metered.held or (limit is None and not tree.has_monthly_limits):
            continue
        open_cost = _unbooked(state, metered, now_ms) if prices.schedules else 0
        if limit is not None:
            jobs[job_id] = _percent(open_cost - ledger.balances.get(job_account(job_id), 0), limit)
        for account in tree.accounts_of(metered.user, metered.project) if tree.has_monthly_limits else ():
            unbooked[account] += open_cost
    return BudgetLevels(
        accounts={
            account: _level(limits, state.accounts.use_of(account), unbooked[account], now_ms)
            for account, limits in tree.limited()
            if limits.is_monthly
        },
        jobs=jobs,
    )


def budgets_due(state: PoolState, now_s: float) -> tuple[BudgetsDue, ...]:
    """Return the event that some level has risen, a month has begun, or a job has not saved in time; at most one."""
    now_ms, book = max(state.meter.now_ms, int(now_s * 1000)), state.accounts
    if 0 <= now_ms - book.scanned_ms < SCAN_MS:
        return ()
    book.scanned_ms = now_ms
    return (BudgetsDue(now_s=now_s),) if are_due(state, now_s, now_ms) else ()


def are_due(state: PoolState, now_s: float, now_ms: int) -> bool:
    """Return whether the event `BudgetsDue` changes the state now."""
    book = state.accounts
    if any(one.percent and now_ms >= one.percent_end_ms for one in book.use.values()):
        return True
    limit_s = state.config.checkpoint_timeout_s
    for job_id in state.meter.jobs:
        job = state.jobs.get(job_id)
        if job is not None and job.pause_reason and job.state == "running" and now_s - job.pause_since_s >= limit_s:
            return True
    found = budget_levels(state, now_ms)
    return any(level > book.use_of(account).percent for account, level in found.accounts.items()) or any(
        level > state.jobs[job_id].price_percent for job_id, level in found.jobs.items()
    )


def _unbooked(state: PoolState, metered: JobMeter, now_ms: int) -> int:
    attempts = {attempt for attempt, _ in metered.held}
    return sum(accrued(state.meter.prices, metered, attempt, now_ms) for attempt in attempts)


def _level(limits: Limits, use: AccountUse, unbooked: int, now_ms: int) -> int:
    """Return the higher of the levels of chip-hours and of spend; of a month that has just begun 0."""
    if now_ms >= use.month_end_ms and use.month_end_ms:
        return 0
    chip_ms = use.chip_ms + use.num_chips * max(0, now_ms - use.at_ms)
    found = [0]
    if limits.chip_hours_per_month is not None:
        found.append(_percent(chip_ms, limits.chip_hours_per_month * MS_PER_HOUR))
    if limits.spend_millionths is not None:
        found.append(_percent(use.millionths + unbooked, limits.spend_millionths))
    return max(found)


def _percent(used: int, limit: int) -> int:
    if used >= limit:
        return FULL_PERCENT
    return WARN_PERCENT if 100 * used >= WARN_PERCENT * limit else 0
