"""`meter_jobs`: after an event, reports to the meter what the jobs that it changed hold now."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.control.accounting.holdings import HoldingKey
from isthmus.control.accounting.meter import Meter
from isthmus.control.coordinator.accounting.metered_holdings import metered_holdings
from isthmus.control.state.events import AgentLost, AgentReported, Event, JobDeleted
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord, PoolState


def meter_jobs(state: PoolState, event: Event) -> None:
    """Observe the jobs that `event` has changed, those that take chips of others, and those of a site that is back."""
    meter, touched, granted = state.meter, state.changed_jobs, dict[str, dict[HoldingKey, int]]()
    if state.indexes.preemptors:
        touched = touched | state.indexes.preemptors.keys()
    if isinstance(event, AgentReported):
        if event.cluster.name in meter.away_sites:
            meter.away_sites.remove(event.cluster.name)
            touched = touched | {job for job, _ in state.clusters[event.cluster.name].parts}
        granted = _granted_ms(state, event, touched)
    elif isinstance(event, AgentLost):
        meter.away_sites.add(event.cluster)
    elif isinstance(event, JobDeleted):
        meter.end(event.job_id)
    for job_id in sorted(touched) if len(touched) > 1 else touched:
        job = state.jobs.get(job_id)
        if job is not None and (job_id in meter.jobs or job.allocated_kbps or _is_allocated(job)):
            holdings = metered_holdings(state, job)
            meter.observe(job_id, job.user, job.priority, holdings, job.project, granted.get(job_id))
            if not holdings and job.state in TERMINAL_STATES:
                meter.end(job_id)
    if meter.absences and isinstance(event, AgentReported):
        _accept_proofs(meter, event)


def _is_allocated(job: JobRecord) -> bool:
    """Return whether a part has chips: also of a job that has ended, whose site may hold them after that."""
    return any(part.allocated for part in job.parts.values())


def _granted_ms(state: PoolState, event: AgentReported, touched: Collection[str]) -> dict[str, dict[HoldingKey, int]]:
    """Return when the site's scheduler granted chips of `touched` jobs, by job: never before the pool asked for them.

    Chips of victims count for these until they are released, so parts that take some are left out.
    """
    found: dict[str, dict[HoldingKey, int]] = {}
    if event.clock_s is None:
        return found
    parts = state.clusters[event.cluster.name].parts
    for one in event.parts:
        if one.granted_at_s is None or one.job not in touched:
            continue
        part = parts.get((one.job, one.attempt))
        if part is not None and not part.victims:
            at_ms = state.meter.now_ms - round((event.clock_s - one.granted_at_s) * 1000)
            found.setdefault(part.job, {})[part.attempt, part.cluster] = max(at_ms, part.allocated_ms)
    return found


def _accept_proofs(meter: Meter, event: AgentReported) -> None:
    """Charge what parts held while their site was away, up to when its agent says that it released them.

    The agent's clock counts from an arbitrary moment: how long ago that was is taken off the server's time.
    """
    for part in event.parts:
        key = part.attempt, event.cluster.name
        if part.released_at_s is None or event.clock_s is None or (part.job, *key) not in meter.absences:
            continue
        ago_s = event.clock_s - part.released_at_s
        if ago_s >= 0:
            meter.prove_until(part.job, key, meter.now_ms - round(ago_s * 1000))
