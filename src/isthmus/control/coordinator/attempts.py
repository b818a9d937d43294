"""How an attempt ends: every part is released, and only then is the job where its ending leads."""

from __future__ import annotations

from isthmus.control.coordinator.job_lifecycle import dequeue, move
from isthmus.control.coordinator.plan_requests import withdraw
from isthmus.control.state.job_records import Ending, JobRecord, State
from isthmus.control.state.queue_index import file_job, set_deadline
from isthmus.control.state.site_records import PartRecord
from isthmus.core.messages.agent_messages import Fault


def stop(state: State, job: JobRecord, ending: Ending, reason: str, now_s: float) -> None:
    """Release every part; the job then goes to `ending`."""
    withdraw(state, job)
    job.ending = ending
    if job.state == "stopping":
        job.reason = reason
        state.touched.add(job.id)
    else:
        move(state, job, "stopping", now_s, reason)
    end_if_released(state, job, now_s)


def end_if_released(state: State, job: JobRecord, now_s: float) -> None:
    """Leave `stopping` once no process and no card is held that anyone could still give back or be harmed by.

    A part that was never told to run has no process and will never have one. Where its site is away it is
    not waited for; its chips stay promised until the site says `released`.
    """
    for part in job.unreleased():
        if part.committed or state.clusters[part.cluster].connected:
            return
    move(state, job, job.ending, now_s, job.reason)


def refuse(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """Give the attempt up before its commit; the job is tried again after a back-off."""
    job.refusals += 1
    stop(state, job, "waiting", reason, now_s)


def refuse_in_queue(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """Take the job out of its sites' queues, since one does not take it; try again after a back-off."""
    job.refusals += 1
    dequeue(state, job)
    if job.state == "blocked":
        move(state, job, "waiting", now_s)
    job.reason = reason
    set_deadline(state, job, now_s + state.rules.backoff_s(job.refusals))
    file_job(state, job)
    state.touched.add(job.id)


def fail(state: State, job: JobRecord, reason: str, now_s: float, fault: Fault = "own") -> None:
    """Give the attempt up after its commit; start again where that could help and restarts are left.

    Whom the owner evicted did not fail: the job waits for its turn again, and no restart is used.
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
    """Release every part for somebody else: the job goes on later from its checkpoint, here or elsewhere."""
    job.setback = f"preempted: {reason}"
    if job.auto:
        job.pinned = False
    stop(state, job, "waiting", job.setback, now_s)


def said(part: PartRecord) -> str:
    """Say what became of a part, in the site's own words where it gave any."""
    what = {"released": "gave its part up", "failed": "failed its part"}.get(part.state, "refused its part")
    return f"{what} (ranks {', '.join(map(str, part.ranks))}): {part.detail or 'no reason given'}"
