"""`make_statement`: the lines of an owner, a user or a job in a month, each rounded once, remainders carried."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from isthmus.control.accounting.book_usage import book_usage
from isthmus.control.accounting.ledger import (
    MS_PER_HOUR,
    UNITS_PER_PRICE,
    Ledger,
    Transaction,
    job_account,
    owner_account,
)
from isthmus.control.accounting.meter import Meter
from isthmus.core.months import month_span_ms, next_month_ms
from isthmus.core.views.ledger_views import PartyKind, StatementLine, StatementView

MILLIONTHS_PER_CENT = 10_000


@dataclass(slots=True, kw_only=True)
class _Sum:
    """The sum of the transactions that make one line."""

    first: Transaction
    amount_ms: int = 0
    first_ms: int = 0
    last_ms: int = 0
    millionths: int = 0


def make_statement(
    transactions: Iterable[Transaction],
    currency: str,
    party: PartyKind,
    name: str,
    month: str,
    now_ms: int,
    *,
    projects: Collection[str] = (),
    viewer: str | None = None,
) -> StatementView:
    """Return the statement of `month` (`YYYY-MM`, UTC) in `currency`; raise `InputError` for other text.

    `transactions` are those of the ledger, and what is held at `now_ms` (`open_transactions`). `projects` are those of
    a project's statement; with a `viewer` it names the jobs of this user only.
    """
    begin_ms, end_ms = month_span_ms(month)
    sums: dict[tuple[object, ...], _Sum] = {}
    earlier = 0
    for one in transactions:
        if one.dated_ms >= end_ms:
            continue
        millionths = party_amount(one, party, name, projects)
        if millionths is None:
            continue
        if one.dated_ms < begin_ms:
            earlier += millionths
            continue
        if viewer not in (None, one.user):
            one = replace(one, job="", user="")
        key = (one.job, one.project, one.kind, one.cluster, one.resource, one.phase, one.price_millionths)
        line = sums.setdefault(key, _Sum(first=one, first_ms=one.begin_ms, last_ms=one.end_ms))
        line.amount_ms += one.amount * (one.end_ms - one.begin_ms)
        line.first_ms, line.last_ms = min(line.first_ms, one.begin_ms), max(line.last_ms, one.end_ms)
        line.millionths += millionths
    carried_in = earlier % MILLIONTHS_PER_CENT
    lines = tuple(_rounded(sums.values(), carried_in))
    exact = carried_in + sum(line.millionths for line in lines)
    return StatementView(
        party=party,
        name=name,
        month=month,
        currency=currency,
        begin_ms=begin_ms,
        end_ms=end_ms,
        until_ms=min(now_ms, end_ms),
        final=now_ms >= end_ms,
        lines=lines,
        carried_in_millionths=carried_in,
        carried_out_millionths=exact % MILLIONTHS_PER_CENT,
        total_cents=exact // MILLIONTHS_PER_CENT,
    )


def open_transactions(meter: Meter, now_ms: int) -> tuple[Transaction, ...]:
    """Return the transactions of everything held, as if it ended at `now_ms`; books nothing; numbers begin at 1."""
    scratch = Ledger()
    ends_ms = [*_month_ends_ms(meter.now_ms, now_ms), now_ms]
    for job_id, job in meter.jobs.items():
        copy = replace(job, remainders=dict(job.remainders), charged=dict(job.charged))
        for opened in job.held.values():
            begins_ms = (opened.since_ms, *ends_ms)
            for interval_ms in zip(begins_ms, ends_ms, strict=False) if not opened.holding.away else ():
                book_usage(scratch, meter.prices, job_id, copy, opened.holding, interval_ms)
    return tuple(scratch.transactions)


def _month_ends_ms(after_ms: int, before_ms: int) -> Iterator[int]:
    while (after_ms := next_month_ms(after_ms)) < before_ms:
        yield after_ms


def party_amount(one: Transaction, party: PartyKind, name: str, projects: Collection[str] = ()) -> int | None:
    """Return what a transaction adds to the statement: income for an owner, cost for others; None: nothing."""
    if party == "owner":
        account, sign = owner_account(name), 1
    else:
        counts = one.project in projects if party == "project" else name == (one.user if party == "user" else one.job)
        if not counts:
            return None
        account, sign = job_account(one.job), -1
    found = [millionths for other, millionths in one.entries if other == account]
    return sign * sum(found) if found else None


def _rounded(sums: Iterable[_Sum], carried_millionths: int) -> Iterator[StatementLine]:
    """Yield the lines in the order of jobs, clusters and times; each takes the remainder of the one before."""
    ordered = sorted(
        sums, key=lambda one: (one.first.job, one.first.cluster, one.first_ms, one.first.kind, one.first.number)
    )
    for one in ordered:
        cents, carried_millionths = divmod(carried_millionths + one.millionths, MILLIONTHS_PER_CENT)
        first, resource = one.first, one.first.resource
        per_hour = MS_PER_HOUR * UNITS_PER_PRICE[resource.kind] if resource else 1
        yield StatementLine(
            job=first.job,
            user=first.user,
            kind=first.kind,
            cluster=first.cluster,
            resource=str(resource) if resource else "",
            phase=first.phase or "",
            price_millionths=first.price_millionths,
            quantity=round(one.amount_ms / per_hour, 6) if resource else 0.0,
            first_ms=one.first_ms,
            last_ms=one.last_ms,
            millionths=one.millionths,
            cents=cents,
            project=first.project,
        )
