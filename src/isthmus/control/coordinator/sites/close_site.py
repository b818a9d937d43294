"""Cordon and drain: a site closed to new parts, and its jobs saved and stopped. A cordon ends when it is lifted."""

from __future__ import annotations

from isthmus.control.coordinator.advance_job import advance_job, notify_preemptor
from isthmus.control.queries.sites.require_site import require_site_record
from isthmus.control.state.events import DrainTimedOut, SiteCordoned, SiteDraining
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_membership import ActorRole, CordonRecord, DrainRecord
from isthmus.control.state.site_records import ClusterRecord
from isthmus.core.errors import AuthError, ConflictError


def admit_cordon(state: PoolState, event: SiteCordoned) -> bool:
    """Return whether the site's state changes; raise for an unknown site, or an operator's cordon that an owner lifts.

    A site that leaves stays closed.
    """
    record = require_site_record(state, event.cluster)
    if event.cordoned:
        return record.cordon is None
    if record.cordon is None:
        return False
    if record.drain is not None and record.drain.leaves:
        raise ConflictError(f"cluster '{event.cluster}' is leaving the pool", hint="isthmus site leave goes on with it")
    _check_right(record, event.role)
    return True


def admit_drain(state: PoolState, event: SiteDraining) -> bool:
    """Return whether this is a new drain, or one that now leaves or ends earlier; raise if the site is unknown."""
    drain = require_site_record(state, event.cluster).drain
    if drain is None or (event.leaves and not drain.leaves):
        return True
    return drain.deadline_s is not None and event.deadline_s < drain.deadline_s


def admit_drain_timeout(state: PoolState, event: DrainTimedOut) -> bool:
    """Return whether the site is drained and its deadline has passed."""
    record = state.clusters.get(event.cluster)
    deadline_s = record.drain.deadline_s if record is not None and record.drain is not None else None
    return deadline_s is not None and deadline_s <= event.now_s


def set_cordon(state: PoolState, event: SiteCordoned) -> None:
    """Close the site to new parts, or open it; jobs that were being saved for a drain go on."""
    record = state.clusters[event.cluster]
    if event.cordoned:
        record.cordon = CordonRecord(by=event.by, role=event.role, since_s=event.now_s)
    else:
        record.cordon, record.drain = None, None
        for job in _jobs_at(state, record):
            if job.preemptor is None and state.drained_site(job) is None:
                for part in job.current_parts():
                    part.checkpoint_requested = False
                state.changed_jobs.add(job.id)
    _capacity_changed(state)


def begin_drain(state: PoolState, event: SiteDraining) -> None:
    """Close the site, and save and stop every job that has a part there."""
    record, known = state.clusters[event.cluster], state.clusters[event.cluster].drain
    if record.cordon is None:
        record.cordon = CordonRecord(by=event.by, role=event.role, since_s=event.now_s)
    if known is None:
        known = DrainRecord(by=event.by, since_s=event.now_s, deadline_s=event.deadline_s)
    deadline_s = None if known.deadline_s is None else min(known.deadline_s, event.deadline_s)
    record.drain = DrainRecord(
        by=known.by, since_s=known.since_s, deadline_s=deadline_s, leaves=known.leaves or event.leaves
    )
    _capacity_changed(state)
    _advance_jobs(state, record, event.now_s)


def end_drain_deadline(state: PoolState, event: DrainTimedOut) -> None:
    """Stop the jobs that still have no new checkpoint."""
    record = state.clusters[event.cluster]
    if record.drain is not None:
        known = record.drain
        record.drain = DrainRecord(by=known.by, since_s=known.since_s, deadline_s=None, leaves=known.leaves)
    _advance_jobs(state, record, event.now_s)


def _check_right(record: ClusterRecord, role: ActorRole) -> None:
    if record.cordon is not None and record.cordon.role == "admin" and role != "admin":
        raise AuthError(
            f"the operator {record.cordon.by} has cordoned cluster '{record.cluster.name}'",
            hint="the operator of the pool lifts it: isthmus site uncordon",
        )


def _jobs_at(state: PoolState, record: ClusterRecord) -> list[JobRecord]:
    return [state.jobs[name] for name in dict.fromkeys(part.job for part in record.parts.values())]


def _advance_jobs(state: PoolState, record: ClusterRecord, now_s: float) -> None:
    for job in _jobs_at(state, record):
        advance_job(state, job, now_s)
        notify_preemptor(state, job, now_s)


def _capacity_changed(state: PoolState) -> None:
    indexes = state.indexes
    indexes.inventory_version += 1
    indexes.capacity_freed = indexes.capacity_added = True
