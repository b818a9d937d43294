"""Queries on the preflight of a job: whether its sites execute checks, and whether they have passed."""

from __future__ import annotations

from isthmus.control.state.job_records import JobRecord, PoolState


def executes_checks(state: PoolState, cluster: str) -> bool:
    """Return whether the cluster is connected and its agent executes the checks of jobs."""
    record = state.clusters.get(cluster)
    return record is not None and record.connected and record.checks


def needs_preflight(state: PoolState, job: JobRecord) -> bool:
    """Return whether a site of the job's plan executes checks."""
    return any(executes_checks(state, cut.cluster) for cut in job.plan_parts)


def has_passed_once(job: JobRecord) -> bool:
    """Return whether the sites of the job's plan have passed its checks, however long ago."""
    record = job.preflight
    return record is not None and record.state == "passed" and job.plan is not None and record.plan_id == job.plan.id
