"""A job moves on when the states of its parts allow it."""

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
    """Take `job` as far as the states of its parts allow."""
    before = None
    while job.state != before and job.state in ADVANCES:
        before = job.state
        ADVANCES[before](state, job, now_s)


def _queued(state: State, job: JobRecord, now_s: float) -> None:
    """A site that does not take the part into its queue: out of all queues."""
    if not job.enqueued:
        return
    for part in job.present():
        if part.state in ("refused", "failed", "released"):
            refuse_in_queue(state, job, f"{part.cluster} {said(part)}", now_s)
            return


def _prepared(state: State, job: JobRecord, now_s: float) -> None:
    """All hold their parts: commit. One does not: all let go."""
    waits = ("ordered", "queued", "ready", "prepared")
    for part in job.present():
        if part.state not in waits:
            refuse(state, job, f"{part.cluster} {said(part)}", now_s)
            return
    if all(part.state == "prepared" for part in job.present()):
        move(state, job, "starting", now_s)


def _started(state: State, job: JobRecord, now_s: float) -> None:
    """Every rank has checked in: hand out the rank map."""
    if _failed_over(state, job, now_s) or job.plan is None:
        return
    if sum(len(part.workers) for part in job.present()) == len(job.plan.ranks):
        move(state, job, "running", now_s)


def _ran(state: State, job: JobRecord, now_s: float) -> None:
    """Every part has succeeded: so has the job, once its cards are back."""
    if _failed_over(state, job, now_s):
        return
    if all(part.state == "succeeded" for part in job.present()):
        stop(state, job, "succeeded", "trained to the end", now_s)


def _stopping(state: State, job: JobRecord, now_s: float) -> None:
    """Tell another reason where a site has since said what the failure was; leave when all is released.

    A site that merely lost a peer may be the first to report; before the attempt is over all have.
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
"""What a job in a state waits for, and does when it is there."""


def _failed_over(state: State, job: JobRecord, now_s: float) -> bool:
    """Stop the job where a part was lost after the commit; return whether one was."""
    lost = [part for part in job.present() if part.state in ("refused", "failed", "released")]
    if lost:
        _blame(state, job, _culprit(lost), now_s)
    return bool(lost)


def _culprit(parts: list[PartRecord]) -> PartRecord:
    """Return the part whose failure explains most: the first of those."""
    found = parts[0]
    for part in parts[1:]:
        found = part if explains_more(part.fault, found.fault) else found
    return found


def _blame(state: State, job: JobRecord, part: PartRecord, now_s: float) -> None:
    reason = f"{part.cluster} {said(part)}"
    if part.fault == "permanent":
        reason += "; another attempt would end in the same way"
    fail(state, job, reason, now_s, part.fault or "own")
