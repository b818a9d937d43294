"""`apply_budgets`: budgets that have passed 80 % warn, and jobs whose budget is used up are saved and wait."""

from __future__ import annotations

from isthmus.control.accounts.account_book import FULL_PERCENT
from isthmus.control.coordinator.accounts.pause_job import end_pause
from isthmus.control.coordinator.accounts.set_accounts import replace_accounts
from isthmus.control.coordinator.advance_job import advance_job, notify_preemptor
from isthmus.control.queries.accounts.budget_levels import BudgetLevels, are_due, budget_levels
from isthmus.control.queries.accounts.limit_refusals import account_text, month_text
from isthmus.control.state.events import AccountsSet, BudgetsDue
from isthmus.control.state.job_records import JobRecord, PoolState


def admit_budgets(state: PoolState, event: BudgetsDue) -> bool:
    """Return whether some level changes now."""
    return are_due(state, event.now_s, max(state.meter.now_ms, int(event.now_s * 1000)))


def apply_budgets(state: PoolState, event: BudgetsDue) -> None:
    """Raise the levels that have been passed, begin a new month, and pause the jobs that may not go on."""
    update_budgets(state, event.now_s, falls=False)


def apply_accounts(state: PoolState, event: AccountsSet) -> None:
    """Put new accounts into effect, with the levels of their budgets."""
    replace_accounts(state, event)
    update_budgets(state, event.now_s, falls=True)


def update_budgets(state: PoolState, now_s: float, *, falls: bool) -> None:
    """Set the levels of all budgets; within a month they only rise, unless `falls`: the limits have changed."""
    now_ms = state.meter.now_ms
    state.accounts.settle_all(now_ms)
    found = budget_levels(state, now_ms)
    _set_account_levels(state, found, now_ms, falls=falls)
    for job_id, percent in found.jobs.items():
        job = state.jobs[job_id]
        if percent > job.price_percent:
            job.price_percent = percent
            state.accounts.notices.append((f"job:{job_id}", percent, f"job {job_id} has cost {percent} % of max_price"))
    for job in [one for one in state.live_jobs.values() if one.charged_chips]:
        _pause_or_go_on(state, job, now_s)


def _set_account_levels(state: PoolState, found: BudgetLevels, now_ms: int, *, falls: bool) -> None:
    book = state.accounts
    for account in sorted(book.use.keys() | found.accounts.keys()):
        use, percent = book.use_of(account), found.accounts.get(account, 0)
        ended = now_ms >= use.percent_end_ms
        if percent == use.percent and not (ended and percent):
            continue
        if percent < use.percent and not (falls or ended):
            continue
        if use.percent >= FULL_PERCENT > percent:
            state.indexes.released_accounts.add(account)
            state.indexes.capacity_freed = True
        if percent > use.percent or (ended and percent):
            limits = book.tree.limits(account)
            full = percent >= FULL_PERCENT
            text = (
                month_text(state, account, limits, use)
                if full
                else f"{account_text(account)} has used 80 % of a budget"
            )
            book.notices.append((account, percent, text))
        book.set_level(account, percent, now_ms)


def _pause_or_go_on(state: PoolState, job: JobRecord, now_s: float) -> None:
    reason = _pause_reason(state, job)
    if reason and not job.pause_reason and job.state not in ("stopping", "preempting"):
        job.pause_reason, job.pause_since_s = reason, now_s
    elif not reason and job.pause_reason:
        end_pause(state, job)
    if job.pause_reason:
        advance_job(state, job, now_s)
        notify_preemptor(state, job, now_s)


def _pause_reason(state: PoolState, job: JobRecord) -> str:
    """Return which budget of the job is used up; "" if none is."""
    if job.price_percent >= FULL_PERCENT:
        return "it has cost its max_price"
    book = state.accounts
    for account in book.tree.accounts_of(job.user, job.project):
        use = book.use_of(account)
        if use.percent >= FULL_PERCENT:
            return month_text(state, account, book.tree.limits(account), use)
    return ""
