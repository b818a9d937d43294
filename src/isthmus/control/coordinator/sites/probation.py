"""The end of a site's probation: after enough jobs that trained to their end there, in time, or by the operator."""

from __future__ import annotations

from dataclasses import replace

from isthmus.control.queries.sites.probation_rules import PROBATION_JOBS
from isthmus.control.queries.sites.require_site import require_site_record
from isthmus.control.state.events import ProbationEnded, SiteAccepted
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord


def admit_acceptance(state: PoolState, event: SiteAccepted) -> bool:
    """Return whether the site is on probation; raise `NotFoundError` for an unknown one."""
    return require_site_record(state, event.cluster).probation is not None


def admit_probation_end(state: PoolState, event: ProbationEnded) -> bool:
    """Return whether the site is on probation and in contact."""
    record = state.clusters.get(event.cluster)
    return record is not None and record.probation is not None and record.connected


def end_probation(state: PoolState, event: SiteAccepted | ProbationEnded) -> None:
    """Let the site take any job from now on."""
    _end(state, state.clusters[event.cluster])


def count_success(state: PoolState, job: JobRecord) -> None:
    """Count a job that has trained to its end at the sites of its parts; end the probation of those that it proves."""
    for part in job.current_parts():
        record = state.clusters.get(part.cluster)
        if record is None or record.probation is None:
            continue
        record.probation = replace(record.probation, num_succeeded=record.probation.num_succeeded + 1)
        if record.probation.num_succeeded >= PROBATION_JOBS:
            _end(state, record)


def _end(state: PoolState, record: ClusterRecord) -> None:
    record.probation, record.cached_free = None, None
    state.indexes.inventory_version += 1
    state.indexes.capacity_freed = state.indexes.capacity_added = True
