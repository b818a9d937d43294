"""The end of an attempt: every part is released, then the job enters its next state."""

from __future__ import annotations

from isthmus.control.coordinator.job_lifecycle import leave_site_queues, move_job
from isthmus.control.coordinator.plan_requests import request_plans, withdraw_plan_request
from isthmus.control.state.job_records import JobRecord, PoolState, StateAfterStop
from isthmus.control.state.site_records import PartRecord
from isthmus.control.state.update_indexes import reindex_job, set_state_deadline
from isthmus.core.messages.agent_messages import FailureCause
from isthmus.core.views.api_views import HistoryKind


def stop_attempt(
    state: PoolState,
    job: JobRecord,
    ending: StateAfterStop,
    reason: str,
    now_s: float,
    *,
    kind: HistoryKind = "stopping",
    told: str | None = None,
    cluster: str | None = None,
    by: str | None = None,
) -> None:
    """Release every part; the job then enters the state `ending`.

    The history gets an entry of `kind` with the text `told` (default: `reason`), about the site `cluster` and
    the other job `by`.
    """
    withdraw_plan_request(state, job)
    job.state_after_stop = ending
    if job.state == "stopping":
        job.reason = reason
        state.changed_jobs.add(job.id)
    else:
        move_job(state, job, "stopping", now_s, reason)
    job.history.add_ending(kind, now_s, job.attempt, reason if told is None else told, cluster, by)
    end_if_released(state, job, now_s)


def end_if_released(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Leave `stopping` once every part that may have processes is released.

    A part that was never ordered to run has no processes: if its site is disconnected, the job does not wait
    for it. Its chips stay allocated until the site reports `released`.
    """
    for part in job.unreleased_parts():
        if part.committed or state.clusters[part.cluster].connected:
            return
    if job.lost_by:
        state.meter.lose(job.id, job.attempt, job.lost_by)
    move_job(state, job, job.state_after_stop, now_s, job.reason, _told_at_end(job))
    if job.state == "waiting" and job.auto_plan and job.last_planned_free is None:
        request_plans(state, job)


def _told_at_end(job: JobRecord) -> str:
    """Return what the last entry of the history adds to the entry with the cause."""
    if job.state_after_stop != "failed":
        return ""
    if job.fault == "permanent":
        return "another attempt would fail in the same way"
    return f"restarts used: {job.restarts} of {job.max_restarts}"


def refuse_attempt(state: PoolState, job: JobRecord, reason: str, now_s: float, *, lost_by: str = "") -> None:
    """Stop the attempt before its commit; the job is retried after a back-off. `lost_by` is the owner at fault."""
    job.refusals += 1
    job.lost_by = lost_by
    stop_attempt(state, job, "waiting", reason, now_s, kind="refused")


def abort_preemption(state: PoolState, job: JobRecord, reason: str, now_s: float) -> None:
    """Stop the attempt of a preempting job before any victim was stopped; the job waits again."""
    job.last_restart_reason = f"preemption aborted, no job was stopped: {reason}"
    job.refusals += job.reclaims or job.moves  # no user decides when it is tried again
    stop_attempt(state, job, "waiting", job.last_restart_reason, now_s, kind="refused")


def refuse_in_queue(state: PoolState, job: JobRecord, reason: str, now_s: float, retry_s: float | None = None) -> None:
    """Remove the job from all site queues; retry after `retry_s`, or, if a site refused it, after a back-off."""
    job.refusals += retry_s is None
    leave_site_queues(state, job)
    if job.state == "blocked":
        move_job(state, job, "waiting", now_s)
    job.reason = reason
    set_state_deadline(state, job, now_s + (retry_s or state.config.backoff_s(job.refusals)))
    reindex_job(state, job)
    state.changed_jobs.add(job.id)


def fail_attempt(
    state: PoolState,
    job: JobRecord,
    reason: str,
    now_s: float,
    fault: FailureCause = "own",
    *,
    cluster: str | None = None,
    lost_by: str = "",
) -> None:
    """Stop the attempt after its commit; restart unless the fault is permanent or no restarts are left.

    An eviction by the owner uses no restart: the job waits in the queue again. `cluster` is the site of the cause,
    `lost_by` the owner at fault.
    """
    job.fault, job.lost_by = fault, lost_by

    def stop(ending: StateAfterStop, text: str) -> None:
        stop_attempt(state, job, ending, text, now_s, kind="lost", told=reason, cluster=cluster)

    if fault == "permanent":
        stop("failed", f"{reason}; another attempt would fail in the same way")
    elif fault == "evicted":
        preempt_job(state, job, reason, now_s, cluster=cluster)
    elif job.restarts < job.max_restarts:
        job.restarts += 1
        job.last_restart_reason = f"restart {job.restarts} of {job.max_restarts}: {reason}"
        stop("waiting", job.last_restart_reason)
    else:
        stop("failed", f"{reason}; restarts used: {job.restarts} of {job.max_restarts}")


def preempt_job(
    state: PoolState,
    job: JobRecord,
    reason: str,
    now_s: float,
    *,
    cluster: str | None = None,
    by: str | None = None,
    moves: bool = False,
) -> None:
    """Release every part, for another job `by` or the owner of `cluster`.

    The job resumes later from its checkpoint, on any sites: one that chooses its plan itself is planned as when it was
    submitted, on what is free once all its parts are released. It keeps its plan if no other one fits. One that `moves`
    keeps its plan and its sites.
    """
    kind: HistoryKind = "moved" if moves else "preempted"
    job.last_restart_reason = text = f"{kind}: {reason}"
    if job.auto_plan and not moves:
        job.plan_fixed, job.last_planned_free, job.last_planned_total = False, None, None
    stop_attempt(state, job, "waiting", text, now_s, kind=kind, told=reason, cluster=cluster, by=by)


def part_failure_text(part: PartRecord) -> str:
    """Describe how a part ended, with the site's message if it gave one."""
    outcome = {"released": "released its part", "failed": "failed its part"}.get(part.state, "refused its part")
    return f"{outcome} (ranks {', '.join(map(str, part.ranks))}): {part.detail or 'no reason given'}"
