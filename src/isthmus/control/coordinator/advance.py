"""State changes of a job that follow from the states of its parts."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.control.coordinator.attempts import end_if_released, fail, refuse, refuse_in_queue, said, stop
from isthmus.control.coordinator.job_lifecycle import move
from isthmus.control.coordinator.joint_preemption import advance_preemption
from isthmus.control.state.job_records import JobRecord, State
from isthmus.control.state.site_records import PartRecord
from isthmus.core.messages.agent_messages import explains_more
from isthmus.core.messages.api_views import JobState


def advance(state: State, job: JobRecord, now_s: float) -> None:
    """Advance `job` as far as the states of its parts allow."""
    before = None
    while job.state != before and job.state in ADVANCES:
        before = job.state
        ADVANCES[before](state, job, now_s)


def _queued(state: State, job: JobRecord, now_s: float) -> None:
    """Leave all site queues if one site does not accept its part."""
    if not job.enqueued:
        return
    for part in job.present():
        if part.state in ("refused", "failed", "released"):
            refuse_in_queue(state, job, f"{part.cluster} {said(part)}", now_s)
            return


def _prepared(state: State, job: JobRecord, now_s: float) -> None:
    """Commit once every site holds its part; release all parts if one site refuses."""
    waits = ("ordered", "queued", "ready", "prepared")
    for part in job.present():
        if part.state not in waits:
            refuse(state, job, f"{part.cluster} {said(part)}", now_s)
            return
    if all(part.state == "prepared" for part in job.present()):
        move(state, job, "starting", now_s)


def _started(state: State, job: JobRecord, now_s: float) -> None:
    """Distribute the rank map once every rank has checked in."""
    if _failed_over(state, job, now_s) or job.plan is None:
        return
    if sum(len(part.workers) for part in job.present()) == len(job.plan.ranks):
        move(state, job, "running", now_s)


def _ran(state: State, job: JobRecord, now_s: float) -> None:
    """Stop with success once every part has succeeded."""
    if _failed_over(state, job, now_s):
        return
    if all(part.state == "succeeded" for part in job.present()):
        stop(state, job, "succeeded", "trained to the end", now_s)


def _stopping(state: State, job: JobRecord, now_s: float) -> None:
    """Update the cause of the failure if a part explains it better; finish once all parts are released.

    A site that only lost a peer may report first; the site with the cause reports before the attempt ends.
    """
    if job.fault is not None and job.ending in ("waiting", "failed") and job.saved_step is None:
        part = _culprit(job.present())
        if explains_more(part.fault, job.fault):
            job.restarts -= job.ending == "waiting" and job.fault != "evicted"
            _blame(state, job, part, now_s)
    if job.state == "stopping":
        end_if_released(state, job, now_s)


ADVANCES: dict[JobState, Callable[[State, JobRecord, float], None]] = {
    "waiting": _queued,
    "blocked": _queued,
    "preempting": advance_preemption,
    "preparing": _prepared,
    "starting": _started,
    "running": _ran,
    "stopping": _stopping,
}
"""For each state, the function that advances a job from it."""


def _failed_over(state: State, job: JobRecord, now_s: float) -> bool:
    """Fail the attempt if a part was lost after the commit; return whether one was."""
    lost = [part for part in job.present() if part.state in ("refused", "failed", "released")]
    if lost:
        _blame(state, job, _culprit(lost), now_s)
    return bool(lost)


def _culprit(parts: list[PartRecord]) -> PartRecord:
    """Return the first part whose fault explains the failure best."""
    found = parts[0]
    for part in parts[1:]:
        found = part if explains_more(part.fault, found.fault) else found
    return found


def _blame(state: State, job: JobRecord, part: PartRecord, now_s: float) -> None:
    reason = f"{part.cluster} {said(part)}"
    if part.fault == "permanent":
        reason += "; another attempt would fail in the same way"
    fail(state, job, reason, now_s, part.fault or "own")
