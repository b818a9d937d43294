"""What a site on probation takes: one job at a time, of no high priority, whose checkpoints it does not have alone."""

from __future__ import annotations

from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord

PROBATION_JOBS = 3
"""Jobs that must train to their end at a site before its probation ends by itself."""
PROBATION_S = 24 * 3600.0
"""Time after which the probation of a site that is in contact ends by itself."""


def probation_refusal(record: ClusterRecord, job: JobRecord) -> str:
    """Return why a site takes no part of a job during its probation; "" if it may.

    That it takes one job at a time follows from its free chips (`ClusterRecord.free_in_group`).
    """
    if record.probation is None:
        return ""
    if job.priority == "high":
        return f"{record.cluster.name} is on probation and takes no job of priority high"
    copies = job.spec.checkpoints
    if record.free_storage_bytes is not None and copies.copies == 0 and copies.copy_store is None:
        return f"{record.cluster.name} is on probation and takes no job whose checkpoints have no copies elsewhere"
    return ""


def probation_refusals(state: PoolState, job: JobRecord) -> tuple[str, ...]:
    """Return why sites of the job's plan take no part of it now; asked of each waiting job after each event."""
    found = []
    for part in job.plan_parts:
        record = state.clusters.get(part.cluster)
        if record is not None and record.probation is not None and (why := probation_refusal(record, job)):
            found.append(why)
    return tuple(found)


def sites_that_refuse(state: PoolState, job: JobRecord) -> set[str]:
    """Return the sites on probation that take no part of a job."""
    return {name for name, record in state.clusters.items() if record.probation and probation_refusal(record, job)}
