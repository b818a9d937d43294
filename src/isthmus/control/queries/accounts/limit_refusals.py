"""`limit_refusal`: the limit that a job would pass if it started now, and what uses it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from isthmus.control.accounts.account_book import FULL_PERCENT, MS_PER_HOUR, AccountUse
from isthmus.control.accounts.account_tree import PROJECT_PREFIX
from isthmus.control.queries.accounts.lent_chips import guaranteeing_project
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.owner.accounts import Limits
from isthmus.core.units import MILLIONTHS
from isthmus.core.views.api_views import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRefusal:
    """Why a job may not start. It may once `account` has released something."""

    account: str
    text: str


def limit_refusal(state: PoolState, job: JobRecord) -> LimitRefusal | None:
    """Return the first limit that the job would pass with the chips of its plan; None if it passes none.

    A job larger than a limit waits for other limits, which no release brings.
    """
    book = state.accounts
    if not book.tree.has_limits and job.max_price_millionths is None:
        return None
    num_chips = job.num_chips
    if job.price_percent >= FULL_PERCENT:
        text = f"it has cost its max_price of {_money(job.max_price_millionths or 0)} {state.meter.prices.currency}"
        return LimitRefusal(account=f"job:{job.id}", text=text)
    for account in book.tree.accounts_of(job.user, job.project):
        limits, use = book.tree.limits(account), book.use_of(account)
        if use.percent >= FULL_PERCENT:
            return LimitRefusal(account=account, text=month_text(state, account, limits, use))
        claimed = _claimed(state, job, account) if account in book.claims else 0
        if limits.chips is None or use.num_chips + claimed + num_chips <= limits.chips:
            continue
        most = f"{account_text(account)} may hold {limits.chips} chips at once"
        if num_chips > limits.chips:
            return LimitRefusal(account=f"above:{account}", text=f"{most}, this job needs {num_chips}")
        held = f"{use.num_chips} are held by {use.num_jobs} job{'s' * (use.num_jobs != 1)}"
        held += f", {claimed} are claimed within a guarantee" if claimed else ""
        return LimitRefusal(account=account, text=f"{most}: {held}, this one needs {num_chips}")
    return None


def _claimed(state: PoolState, job: JobRecord, account: str) -> int:
    """Return the chips that others claim of an account; for a job within a guarantee below it 0."""
    project = guaranteeing_project(state, job)
    above = state.accounts.tree.chain(project)[1:] if project else ()
    return 0 if account.removeprefix(PROJECT_PREFIX) in above else state.accounts.claimed_by_others(account, job.id)


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


def account_text(account: str) -> str:
    """Return an account as text: `project nlp`."""
    return account.replace(":", " ", 1)


def _money(millionths: int) -> str:
    return f"{millionths / MILLIONTHS:,.2f}"
