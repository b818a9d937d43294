"""The end of an attempt: every part is released, then the job enters its next state."""

from __future__ import annotations

from isthmus.control.coordinator.job_lifecycle import dequeue, move
from isthmus.control.coordinator.plan_requests import withdraw
from isthmus.control.state.job_records import Ending, JobRecord, State
from isthmus.control.state.queue_index import file_job, set_deadline
from isthmus.control.state.site_records import PartRecord
from isthmus.core.messages.agent_messages import Fault


def stop(state: State, job: JobRecord, ending: Ending, reason: str, now_s: float) -> None:
    """Release every part; the job then enters the state `ending`."""
    withdraw(state, job)
    job.ending = ending
    if job.state == "stopping":
        job.reason = reason
        state.touched.add(job.id)
    else:
        move(state, job, "stopping", now_s, reason)
    end_if_released(state, job, now_s)


def end_if_released(state: State, job: JobRecord, now_s: float) -> None:
    """Leave `stopping` once every part that may have processes is released.

    A part that was never ordered to run has no processes: if its site is disconnected, the job does not wait
    for it. Its chips stay allocated until the site reports `released`.
    """
    for part in job.unreleased():
        if part.committed or state.clusters[part.cluster].connected:
            return
    move(state, job, job.ending, now_s, job.reason)


def refuse(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """Stop the attempt before its commit; the job is retried after a back-off."""
    job.refusals += 1
    stop(state, job, "waiting", reason, now_s)


def refuse_in_queue(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """Remove the job from all site queues after one refused it; retry after a back-off."""
    job.refusals += 1
    dequeue(state, job)
    if job.state == "blocked":
        move(state, job, "waiting", now_s)
    job.reason = reason
    set_deadline(state, job, now_s + state.rules.backoff_s(job.refusals))
    file_job(state, job)
    state.touched.add(job.id)


def fail(state: State, job: JobRecord, reason: str, now_s: float, fault: Fault = "own") -> None:
    """Stop the attempt after its commit; restart unless the fault is permanent or no restarts are left.

    An eviction by the owner uses no restart: the job waits in the queue again.
    """
    job.fault = fault
    if fault == "permanent":
        stop(state, job, "failed", reason, now_s)
    elif fault == "evicted":
        give_way(state, job, reason, now_s)
    elif job.restarts < job.max_restarts:
        job.restarts += 1
        job.setback = f"restart {job.restarts} of {job.max_restarts}: {reason}"
        stop(state, job, "waiting", job.setback, now_s)
    else:
        stop(state, job, "failed", f"{reason}; restarts used: {job.restarts} of {job.max_restarts}", now_s)


def give_way(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """Release every part for another job; this one resumes later from its checkpoint, on any sites."""
    job.setback = f"preempted: {reason}"
    if job.auto:
        job.pinned = False
    stop(state, job, "waiting", job.setback, now_s)


def said(part: PartRecord) -> str:
    """Describe how a part ended, with the site's message if it gave one."""
    outcome = {"released": "released its part", "failed": "failed its part"}.get(
        part.state, "refused its part"
    )
    return f"{outcome} (ranks {', '.join(map(str, part.ranks))}): {part.detail or 'no reason given'}"
