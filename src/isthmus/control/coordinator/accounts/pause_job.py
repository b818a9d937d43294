"""`pause_job`: saves and stops a job that may not hold chips any more; it waits again, with its checkpoint."""

from __future__ import annotations

from isthmus.control.coordinator.attempts import abort_preemption, preempt_job
from isthmus.control.state.job_records import JobRecord, PoolState


def pause_job(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Take the next step of stopping `job`, if it is to be paused.

    A running job is stopped once all its parts have verified a checkpoint of one step, or without one after
    `checkpoint_timeout_s`.
    """
    if not job.pause_reason:
        return
    reason = job.pause_reason
    if job.state == "running":
        _save_and_stop(state, job, now_s)
        return
    job.pause_reason = ""
    if job.state == "preempting":
        abort_preemption(state, job, reason, now_s)
    elif job.state in ("preparing", "starting"):
        preempt_job(state, job, reason, now_s)


def end_pause(state: PoolState, job: JobRecord) -> None:
    """Let a job go on that has not been stopped yet."""
    job.pause_reason = ""
    if job.state == "running" and job.preemptor is None and state.drained_site(job) is None:
        for part in job.current_parts():
            part.checkpoint_requested = False
    state.changed_jobs.add(job.id)


def _save_and_stop(state: PoolState, job: JobRecord, now_s: float) -> None:
    parts, reason = job.current_parts(), job.pause_reason
    step = job.verified_step() if all(part.checkpoint_requested for part in parts) else None
    if step is not None:
        job.pause_reason, job.saved_step = "", step
        preempt_job(state, job, f"{reason}, checkpoint at step {step}", now_s)
    elif now_s - job.pause_since_s >= state.config.checkpoint_timeout_s:
        job.pause_reason = ""
        preempt_job(state, job, f"{reason}, without a new checkpoint", now_s)
    elif not all(part.checkpoint_requested for part in parts):
        for part in parts:
            part.checkpoint_requested, part.verified_checkpoint = True, None
        job.reason = f"saves a checkpoint: {reason}"
        state.changed_jobs.add(job.id)
