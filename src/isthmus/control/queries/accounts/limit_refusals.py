"""`limit_refusal`: the limit that a job would pass if it started now, and what uses it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from isthmus.control.accounts.account_book import FULL_PERCENT, MS_PER_HOUR, AccountUse
from isthmus.control.accounts.account_tree import PROJECT_PREFIX
from isthmus.control.queries.accounts.lent_chips import guaranteeing_project
from isthmus.control.state.allocations import chip_needs_of
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.owner.accounts import Limits
from isthmus.core.owner.chip_scope import ALL_CHIPS, ChipScope
from isthmus.core.units import MILLIONTHS
from isthmus.core.views.api_views import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRefusal:
    """Why a job may not start. It may once `account` has released something."""

    account: str
    text: str
    # The chips that a limit on chips is about.
    scope: ChipScope = ALL_CHIPS


def limit_refusal(state: PoolState, job: JobRecord) -> LimitRefusal | None:
    """Return the first limit that the job would pass with the chips of its plan; None if it passes none.

    A job larger than a limit waits for other limits, which no release brings.
    """
    book = state.accounts
    if not book.tree.has_limits and job.max_price_millionths is None:
        return None
    if job.price_percent >= FULL_PERCENT:
        text = f"it has cost its max_price of {_money(job.max_price_millionths or 0)} {state.meter.prices.currency}"
        return LimitRefusal(account=f"job:{job.id}", text=text)
    for account in book.tree.accounts_of(job.user, job.project):
        limits, use = book.tree.limits(account), book.use_of(account)
        if use.percent >= FULL_PERCENT:
            return LimitRefusal(account=account, text=month_text(state, account, limits, use))
        for scope, limit in limits.on_chips.items():
            refusal = _chips_refusal(state, job, account, scope, limit)
            if refusal is not None:
                return refusal
    return None


def _chips_refusal(state: PoolState, job: JobRecord, account: str, scope: ChipScope, limit: int) -> LimitRefusal | None:
    """Return why a job may not start by a limit on the chips of `scope`; None if it may."""
    book, needed = state.accounts, _chips_in(scope, job)
    held = book.use_of(account).chips_in(scope)
    claimed = _claimed(state, job, account, scope) if account in book.claims else 0
    if not needed or held + claimed + needed <= limit:
        return None
    most = f"{account_text(account)} may hold {limit} chips{scope.of_text} at once"
    if needed > limit:
        return LimitRefusal(account=f"above:{account}", text=f"{most}, this job needs {needed}", scope=scope)
    num_jobs = _num_holders(state, account, scope)
    text = f"{most}: {held} are held by {num_jobs} job{'s' * (num_jobs != 1)}"
    text += f", {claimed} are claimed within a guarantee" if claimed else ""
    return LimitRefusal(account=account, text=f"{text}, this one needs {needed}", scope=scope)


def _num_holders(state: PoolState, account: str, scope: ChipScope) -> int:
    """Return the number of jobs of an account that hold chips of a scope."""
    book, record = state.accounts, state.clusters.get(scope.cluster)
    if record is None:
        return book.use_of(account).num_jobs
    jobs = (state.jobs[name] for name in dict.fromkeys(name for name, _ in record.parts))
    held = (job for job in jobs if job.charged_chips and _chips_in(scope, job))
    return sum(account in book.tree.accounts_of(job.user, job.project) for job in held)


def _claimed(state: PoolState, job: JobRecord, account: str, scope: ChipScope) -> int:
    """Return the chips of a scope that others claim of an account; for a job within a guarantee below it 0."""
    project, book = guaranteeing_project(state, job), state.accounts
    above = book.tree.chain(project)[1:] if project else ()
    if account.removeprefix(PROJECT_PREFIX) in above:
        return 0
    others = (one for one in book.claims.get(account, ()) if one != job.id)
    return sum(_chips_in(scope, state.jobs[one]) for one in others)


def _chips_in(scope: ChipScope, job: JobRecord) -> int:
    """Return the chips of a scope that the plan of a job needs."""
    return scope.chips_in(chip_needs_of(job.plan_parts)) if scope.cluster else job.num_chips


def month_text(state: PoolState, account: str, limits: Limits, use: AccountUse) -> str:
    """Say which amount of the month is used up."""
    month = f"{datetime.fromtimestamp(use.month_begin_ms / 1000, UTC):%Y-%m}"
    spend, hours = limits.spend_millionths, limits.chip_hours_per_month
    if hours is not None and (spend is None or use.chip_ms >= hours * MS_PER_HOUR):
        return f"{account_text(account)} has used its {hours:,} chip-hours of {month}"
    return f"{account_text(account)} has spent its {_money(spend or 0)} {state.meter.prices.currency} of {month}"


def within_limits(state: PoolState, job: JobRecord) -> Submission:
    """Return the submission with `placement.max_chips` no larger than the limits on chips at once admit.

    So no plan is larger than a limit. A command chooses its number of processes itself.
    """
    submission, most = job.submission, max_chips_of(state, job)
    if most is None or submission.job.engine == "command":
        return submission
    placement = submission.job.placement
    if placement.max_chips is not None and placement.max_chips <= most:
        return submission
    placement = placement.model_copy(update={"max_chips": most})
    return submission.model_copy(update={"job": submission.job.model_copy(update={"placement": placement})})


def max_chips_of(state: PoolState, job: JobRecord) -> int | None:
    """Return the lowest limit on chips at once of the job's accounts, at least 1; None if there is none."""
    tree = state.accounts.tree
    limits = [tree.limits(account).chips for account in tree.accounts_of(job.user, job.project)]
    return max(1, min(one for one in limits if one is not None)) if any(one is not None for one in limits) else None


def is_above_limits(state: PoolState, job: JobRecord) -> bool:
    """Return whether the job's plan has more chips than a limit of its accounts, so that it can never start."""
    tree = state.accounts.tree
    return any(
        _chips_in(scope, job) > (limit if scope.cluster else max(1, limit))
        for account in tree.accounts_of(job.user, job.project)
        for scope, limit in tree.limits(account).on_chips.items()
    )


def free_within_limits(state: PoolState, job: JobRecord, free: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return `free` chips with no more at a cluster or node group than the limits of the job's accounts there admit.

    Limits of node groups count first. A limit of a cluster goes to the first of its node groups whose chips the job may
    use.
    """
    tree, kinds = state.accounts.tree, job.spec.placement.chips
    if not tree.has_places:
        return free
    found = {cluster: dict(groups) for cluster, groups in free.items()}
    lines = [one for name in tree.accounts_of(job.user, job.project) for one in tree.limits(name).chips_at]
    for line in sorted(lines, key=lambda one: one.node_group is None):
        groups, left = found.get(line.cluster, {}), line.chips
        named = state.clusters[line.cluster].cluster.node_groups if groups else ()
        for group in sorted(named, key=lambda one: bool(kinds) and one.chip not in kinds):
            if group.name in groups and line.node_group in (None, group.name):
                groups[group.name] = min(groups[group.name], left)
                left -= groups[group.name]
    return found


def account_text(account: str) -> str:
    """Return an account as text: `project nlp`."""
    return account.replace(":", " ", 1)


def _money(millionths: int) -> str:
    return f"{millionths / MILLIONTHS:,.2f}"
