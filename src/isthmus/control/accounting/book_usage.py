"""`book_usage`: an interval of a holding becomes transactions, cut where the price changes; `accrued` only counts."""

from __future__ import annotations

from isthmus.control.accounting.holdings import Holding, HoldingKey, JobMeter
from isthmus.control.accounting.ledger import (
    MS_PER_HOUR,
    UNITS_PER_PRICE,
    Ledger,
    Transaction,
    TransactionKind,
    job_account,
    owner_account,
)
from isthmus.control.accounting.price_book import PriceBook
from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority

DIVISORS = {kind: MS_PER_HOUR * units for kind, units in UNITS_PER_PRICE.items()}
"""By kind of resource: what turns price times amount times milliseconds into millionths."""


def book_usage(
    ledger: Ledger,
    prices: PriceBook,
    job_id: str,
    job: JobMeter,
    holding: Holding,
    interval_ms: tuple[int, int],
    proved_ms: int | None = None,
) -> None:
    """Charge `holding` in [begin, end) to its job and credit it to its owner; owners at fault pay the job back.

    Usage without a price is not booked. With `proved_ms` the usage is dated then, since its month may be closed. A
    division by hours leaves a remainder below a millionth, which the next one of the same resource begins with.
    """
    begin_ms, end_ms = interval_ms
    kind: TransactionKind = "usage" if proved_ms is None else "proven"
    charged, credited = job_account(job_id), owner_account(holding.owner)
    attempt, remainders = holding.attempt, job.remainders
    for resource, amount in holding.amounts:
        if not amount or resource not in prices.schedules:
            continue
        for span_begin_ms, span_end_ms, price_millionths in prices.spans(resource, job.job_class, begin_ms, end_ms):
            if price_millionths is None:
                continue
            exact = remainders.get(resource, 0) + price_millionths * amount * (span_end_ms - span_begin_ms)
            millionths, remainders[resource] = divmod(exact, DIVISORS[resource.kind])
            dated_ms = span_begin_ms if proved_ms is None else proved_ms
            ledger.add(
                Transaction(
                    number=ledger.next_number,
                    kind=kind,
                    dated_ms=dated_ms,
                    job=job_id,
                    user=job.user,
                    attempt=attempt,
                    cluster=holding.cluster,
                    project=job.project,
                    resource=resource,
                    phase=holding.phase,
                    begin_ms=span_begin_ms,
                    end_ms=span_end_ms,
                    amount=amount,
                    price_millionths=price_millionths,
                    entries=((charged, -millionths), (credited, millionths)),
                )
            )
            if attempt in job.lost_by:
                credit_back(ledger, job_id, job, holding.key, "lost", (job.lost_by[attempt],), millionths, dated_ms)
            elif holding.late:
                credit_back(ledger, job_id, job, holding.key, "late", holding.late, millionths, dated_ms)
            else:
                job.charged[attempt] = job.charged.get(attempt, 0) + millionths


def credit_back(
    ledger: Ledger,
    job_id: str,
    job: JobMeter,
    key: HoldingKey,
    kind: TransactionKind,
    owners: tuple[str, ...],
    millionths: int,
    dated_ms: int,
) -> None:
    """Transfer `millionths` from the owners at fault to the job, in shares that differ by at most one millionth."""
    if not millionths:
        return
    share, rest = divmod(millionths, len(owners))
    paid = tuple((owner_account(owner), -share - (index < rest)) for index, owner in enumerate(owners))
    ledger.add(
        Transaction(
            number=ledger.next_number,
            kind=kind,
            dated_ms=dated_ms,
            job=job_id,
            user=job.user,
            attempt=key[0],
            cluster=key[1],
            project=job.project,
            begin_ms=dated_ms,
            end_ms=dated_ms,
            entries=(*paid, (job_account(job_id), millionths)),
        )
    )


def accrued(prices: PriceBook, job: JobMeter, attempt: int, now_ms: int) -> int:
    """Return what an attempt has cost since its open holdings were last booked, in millionths, without booking it."""
    numerators = dict(job.remainders)
    total = 0
    for (of, _), opened in job.held.items():
        if of != attempt or opened.holding.late or opened.holding.away or of in job.lost_by:
            continue
        for resource, amount in opened.holding.amounts:
            for span in prices.spans(resource, job.job_class, opened.since_ms, now_ms):
                exact = (span.price_millionths or 0) * amount * (span.end_ms - span.begin_ms)
                millionths, numerators[resource] = divmod(numerators.get(resource, 0) + exact, DIVISORS[resource.kind])
                total += millionths
    return total


def cost_millionths(
    prices: PriceBook, resource: PoolResource, job_class: Priority, amount: int, begin_ms: int, end_ms: int
) -> int:
    """Return what an amount of a resource costs in [begin, end) by published prices, in millionths, rounded down."""
    spans = prices.spans(resource, job_class, begin_ms, end_ms)
    exact = sum((one.price_millionths or 0) * (one.end_ms - one.begin_ms) for one in spans)
    return exact * amount // DIVISORS[resource.kind]
