"""`drain_job`: takes a job away from a site that is drained; a job that trains saves a checkpoint first."""

from __future__ import annotations

from isthmus.control.coordinator.attempts import abort_preemption, preempt_job
from isthmus.control.coordinator.job_lifecycle import leave_site_queues
from isthmus.control.coordinator.sites.elastic_parts import let_part_go
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord


def drain_job(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Take the next step of moving `job` away from a draining site; do nothing if it has no part at one.

    A running job is stopped once all its parts have verified a checkpoint of one step, or at the drain's deadline.
    """
    record = state.drained_site(job)
    if record is None or record.drain is None:
        return
    reason = f"{record.cluster.name} is drained"
    if job.state in WAITING_STATES:
        leave_site_queues(state, job)
    elif job.state == "preempting":
        abort_preemption(state, job, reason, now_s)
    elif job.state in ("preparing", "starting"):
        job.lost_by = record.cluster.owner
        preempt_job(state, job, reason, now_s, cluster=record.cluster.name)
    elif job.state == "running" and not _leaves(state, job, record, now_s):
        _save_and_stop(state, job, record, now_s)


def _leaves(state: PoolState, job: JobRecord, record: ClusterRecord, now_s: float) -> bool:
    """Let the job go on without its part at the site, if it can; return whether it can."""
    reason = f"{record.cluster.name} is drained"
    parts = [part for part in job.remaining_parts() if part.cluster == record.cluster.name]
    return all(let_part_go(state, job, part, reason, now_s) for part in parts)


def _save_and_stop(state: PoolState, job: JobRecord, record: ClusterRecord, now_s: float) -> None:
    parts, name = job.training_parts(), record.cluster.name
    step = job.verified_step() if all(part.checkpoint_requested for part in parts) else None
    if step is not None:
        job.saved_step = step
        preempt_job(state, job, f"{name} is drained, checkpoint at step {step}", now_s, cluster=name)
    elif record.drain is not None and record.drain.deadline_s is None:
        job.lost_by = record.cluster.owner
        preempt_job(state, job, f"{name} is drained, without a new checkpoint by the deadline", now_s, cluster=name)
    elif not all(part.checkpoint_requested for part in parts):
        for part in parts:
            part.checkpoint_requested, part.verified_checkpoint = True, None
        job.reason = f"saves a checkpoint: {name} is drained"
        state.changed_jobs.add(job.id)
