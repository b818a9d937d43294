"""`follow_copies`: what follows from a site's new copies of versions: jobs may start, or have to go elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.control.coordinator.job_preflight import exclude_sites
from isthmus.control.queries.catalogue.catalogue_versions import missing_versions
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState
from isthmus.core.catalogue import HeldCopy

Copies = Mapping[tuple[str, str], HeldCopy]
"""A site's copies by owner and version."""


def follow_copies(state: PoolState, cluster: str, before: Copies, now_s: float) -> None:
    """Act on the change of a site's copies since `before`, for the jobs that wait in its queue."""
    copies = state.clusters[cluster].copies or {}
    changed = {key for key, one in copies.items() if before.get(key) != one}
    for job in _waiting_jobs(state, cluster) if changed else ():
        mine = [copies[key] for key in sorted(changed) if any((one.owner, one.version) == key for one in job.versions)]
        if not mine:
            continue
        state.changed_jobs.add(job.id)
        if problems := [f"{cluster}: {one.problem}" for one in mine if one.problem and not one.complete]:
            exclude_sites(state, job, {frozenset({cluster}): "; ".join(problems)}, now_s)
        elif any(one.complete for one in mine) and not missing_versions(state, job):
            job.history.add("brought", now_s, job.attempt, "every site of its plan has the job's model and data")
            state.indexes.capacity_freed = True


def _waiting_jobs(state: PoolState, cluster: str) -> list[JobRecord]:
    """Return the waiting jobs with versions that are in the site's queue."""
    jobs = (state.jobs[part.job] for part in state.clusters[cluster].parts.values() if part.desired == "queued")
    return [job for job in jobs if job.versions and job.state in WAITING_STATES]
