"""`metering_problems`: whether the meter holds what the jobs hold, and the accounts sum to 0; for tests and chaos."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.coordinator.accounting.metered_holdings import metered_holdings
from isthmus.control.state.job_records import PoolState


def metering_problems(state: PoolState) -> Iterator[str]:
    """Yield a message for each job that is metered wrongly, and for balances that do not sum to 0."""
    held = {job_id: {key: one.holding for key, one in job.held.items()} for job_id, job in state.meter.jobs.items()}
    for job_id in sorted(state.jobs.keys() | held.keys()):
        job = state.jobs.get(job_id)
        expected = {one.key: one for one in metered_holdings(state, job)} if job is not None else {}
        if held.get(job_id, {}) != expected:
            yield f"job {job_id} is metered with {held.get(job_id, {})}, but holds {expected}"
    if total := sum(state.meter.ledger.balances.values()):
        yield f"the balances of all accounts sum to {total} millionths"
