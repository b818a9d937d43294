"""`party_holdings`: a copy of what one owner, user or job has open in a meter, with the prices of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from isthmus.control.accounting.holdings import JobMeter
from isthmus.control.accounting.meter import Meter
from isthmus.control.accounting.price_book import PriceBook
from isthmus.core.views.ledger_views import PartyKind


def party_holdings(meter: Meter, party: PartyKind, name: str, projects: Collection[str] = ()) -> Meter:
    """Return a meter without a ledger with the jobs for whose present holdings `name` owes or is owed something.

    `projects` are those of a project's statement.

    No later event changes it, so another thread may read it.
    """
    jobs = {
        job_id: replace(
            job,
            held={key: replace(one) for key, one in job.held.items()},
            remainders=dict(job.remainders),
            charged=dict(job.charged),
            lost_by=dict(job.lost_by),
        )
        for job_id, job in meter.jobs.items()
        if _concerns(job_id, job, party, name, projects)
    }
    held = (opened.holding for job in jobs.values() for opened in job.held.values())
    resources = {resource for holding in held for resource, _ in holding.amounts}
    schedules = {one: list(meter.prices.schedules[one]) for one in resources if one in meter.prices.schedules}
    return Meter(now_ms=meter.now_ms, jobs=jobs, prices=PriceBook(currency=meter.prices.currency, schedules=schedules))


def _concerns(job_id: str, job: JobMeter, party: PartyKind, name: str, projects: Collection[str]) -> bool:
    if party == "project":
        return job.project in projects
    if party == "job":
        return job_id == name
    if party == "user":
        return job.user == name
    return name in job.lost_by.values() or any(
        name == one.holding.owner or name in one.holding.late for one in job.held.values()
    )
