"""Accounts that the operator sets: their check against what runs, and their effect on jobs and the queue."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from isthmus.control.accounts.account_book import MS_PER_HOUR
from isthmus.control.accounts.account_tree import PROJECT_PREFIX, AccountTree
from isthmus.control.coordinator.accounts.check_places import check_places
from isthmus.control.coordinator.job_lifecycle import leave_site_queues
from isthmus.control.coordinator.plan_requests import is_plan_requested, request_plans
from isthmus.control.queries.accounts.limit_refusals import account_text, is_above_limits
from isthmus.control.state.allocations import chip_needs_of
from isthmus.control.state.events import AccountsSet
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState, project_rank
from isthmus.control.state.update_indexes import job_at_key, rank_job, uncap
from isthmus.core.errors import ConflictError
from isthmus.core.owner.accounts import Limits
from isthmus.core.owner.check_accounts import check_accounts

MAX_NAMED_JOBS = 5
"""Jobs that a refusal names."""
Holders = list[tuple[JobRecord, int]]
"""Jobs with the chips that they hold."""


def admit_accounts(state: PoolState, event: AccountsSet) -> bool:
    """Return whether the accounts differ from those in effect.

    Raises `FieldError` for accounts that contradict themselves or guarantee chips that do not exist; `ConflictError`
    for a limit below what runs, with the time at which it would hold, for chips that are guaranteed to others, and for
    a project that is left out and has jobs.
    """
    check_accounts(event.accounts)
    if event.accounts == state.accounts.accounts:
        return False
    check_places(state, event.accounts)
    tree = AccountTree(event.accounts)
    gone = Counter(job.project for job in state.live_jobs.values() if job.project and job.project not in tree.projects)
    if gone:
        name, number = min(gone.items())
        raise ConflictError(
            f"project '{name}' is left out, but {number} of its jobs have not ended",
            hint=f"cancel them or wait: isthmus quota show --project {name}",
        )
    known, holders, held_before = state.accounts.tree, _holders(state, tree), _holders(state, state.accounts.tree)
    for account, limits in tree.limited():
        is_changed = limits != known.limits(account) or holders.get(account) != held_before.get(account)
        if account in holders and is_changed:
            _check_limits(state, account, limits, holders[account], event.now_s)
    return True


def _holders(state: PoolState, tree: AccountTree) -> dict[str, list[JobRecord]]:
    """Return the jobs that hold chips, by the accounts that they count to."""
    found: dict[str, list[JobRecord]] = {}
    for job in state.live_jobs.values():
        for account in tree.accounts_of(job.user, job.project) if job.charged_chips else ():
            found.setdefault(account, []).append(job)
    return found


def replace_accounts(state: PoolState, event: AccountsSet) -> None:
    """Put the accounts into effect: what jobs hold counts to them, and jobs that a limit kept out are tried again."""
    book, now_ms = state.accounts, state.meter.now_ms
    book.clear_holdings(now_ms)
    book.accounts = event.accounts
    for job in state.live_jobs.values():
        if job.charged_chips:
            accounts = book.tree.accounts_of(job.user, job.project)
            book.hold(accounts, job.charged_chips, 1, now_ms)
            if book.tree.has_places:
                book.hold_at(accounts, chip_needs_of(job.plan_parts), 1)
    share_projects(state)
    for keys in [tuple(one) for one in state.indexes.capped.values()]:
        for key in keys:
            uncap(state, job_at_key(state, key))
    for job in state.live_jobs.values() if event.ranks_waiting else ():
        project = book.tree.projects.get(job.project)
        if project is not None and not job.charged_chips and project_rank(project) != job.project_rank:
            leave_site_queues(state, job)
            rank_job(state, job, project)
    for job in state.live_jobs.values():
        replans = job.state in WAITING_STATES and job.auto_plan and not job.plan_fixed
        if replans and is_above_limits(state, job) and not is_plan_requested(state, job):
            request_plans(state, job)
    state.indexes.capacity_freed = True


def share_projects(state: PoolState) -> None:
    """Let projects share by the accounts in effect: by their tree, or by the part of the whole that each has in it."""
    shares, tree = state.shares, state.accounts.tree
    if shares.by_tree:
        shares.project_weights = {PROJECT_PREFIX + one.name: one.weight for one in tree.projects.values()}
        shares.paths = tree.paths()
    else:
        shares.project_weights, shares.paths = tree.shares(), {}


def _check_limits(state: PoolState, account: str, limits: Limits, holders: list[JobRecord], now_s: float) -> None:
    name = account_text(account)
    for scope, limit in limits.on_chips.items():
        counted = [(job, chips) for job in holders if (chips := scope.chips_in(chip_needs_of(job.plan_parts)))]
        held = sum(chips for _, chips in counted)
        if held > limit:
            raise ConflictError(
                f"{name} holds {held} chips{scope.of_text} now, more than {limit}; "
                f"{_when(counted, held - limit, now_s)}",
                hint=f"set it then, or end jobs first; they hold chips: {_named(counted)}",
            )
    holding = [(job, job.charged_chips) for job in holders]
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
            hint=f"set it then, or end jobs first; they hold chips: {_named(holding)}",
        )
    spend = limits.spend_millionths
    if spend is not None and use.millionths > spend:
        raise ConflictError(
            f"{name} has spent {use.millionths / 1e6:,.2f} this month, more than {spend / 1e6:,.2f}, and its jobs run; "
            f"it would hold from {next_month} on",
            hint=f"set it then, or end jobs first; they hold chips: {_named(holding)}",
        )


def _when(holders: Holders, excess: int, now_s: float) -> str:
    """Say when jobs that hold `excess` chips will have ended."""
    ends = ((max(now_s, job.expected_end_s), job, chips) for job, chips in holders if job.expected_end_s is not None)
    for end_s, job, chips in sorted(ends, key=lambda one: (one[0], one[1].number)):
        excess -= chips
        if excess <= 0:
            return f"it would hold at {_utc(end_s)}, when {job.id} should have ended"
    return "when it would hold is not known: not all of its jobs have a predicted end"


def _named(holders: Holders) -> str:
    names = [f"{job.id} ({chips})" for job, chips in holders[:MAX_NAMED_JOBS]]
    more = len(holders) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _utc(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
