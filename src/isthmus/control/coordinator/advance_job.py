"""State changes of a job that follow from the states of its parts."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.control.coordinator.accounting.metered_holdings import owner_of_part
from isthmus.control.coordinator.accounts.pause_job import pause_job
from isthmus.control.coordinator.attempts import (
    end_if_released,
    fail_attempt,
    part_failure_text,
    refuse_attempt,
    refuse_in_queue,
    stop_attempt,
)
from isthmus.control.coordinator.job_lifecycle import move_job
from isthmus.control.coordinator.joint_preemption import advance_preemption
from isthmus.control.coordinator.sites.drain_job import drain_job
from isthmus.control.coordinator.sites.elastic_parts import let_part_go, start_joining_parts
from isthmus.control.coordinator.sites.probation import count_success
from isthmus.control.queries.accounts.price_quotes import quote
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.reconcile_log import may_start_now
from isthmus.control.state.site_records import PartRecord
from isthmus.core.messages.agent_messages import is_closer_to_root_cause
from isthmus.core.views.api_views import JobState


def advance_job(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Advance `job` as far as the states of its parts allow, away from sites that are drained, and to its pause."""
    drain_job(state, job, now_s)
    pause_job(state, job, now_s)
    before = None
    while job.state != before and job.state in ADVANCE_BY_STATE:
        before = job.state
        ADVANCE_BY_STATE[before](state, job, now_s)


def notify_preemptor(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Advance the job that preempts this one."""
    requester = state.jobs.get(job.preemptor or "")
    if requester is not None and requester.state == "preempting":
        advance_job(state, requester, now_s)


def _advance_queued(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Leave all site queues if one site does not accept its part."""
    if not job.in_site_queues:
        return
    for part in job.current_parts():
        if part.state in ("refused", "failed", "released"):
            refuse_in_queue(state, job, f"{part.cluster} {part_failure_text(part)}", now_s)
            return


def _advance_preparing(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Commit once every site holds its part; release all parts if one site refuses."""
    waits = ("ordered", "queued", "ready", "prepared")
    for part in job.current_parts():
        if part.state not in waits:
            lost_by = _owner_at_fault(state, part)
            refuse_attempt(state, job, f"{part.cluster} {part_failure_text(part)}", now_s, lost_by=lost_by)
            return
    if all(part.state == "prepared" for part in job.current_parts()) and may_start_now(state, job):
        if job.quoted_millionths is None and job.plan is not None and not job.has_run:
            job.quoted_millionths = quote(state, job, job.plan)
        move_job(state, job, "starting", now_s)


def _advance_starting(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Distribute the rank map once every rank has checked in."""
    if _fail_if_part_lost(state, job, now_s) or job.plan is None:
        return
    if all(len(part.workers) == len(part.ranks) for part in job.current_parts()):
        move_job(state, job, "running", now_s)


def _advance_running(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Stop with success once every part has succeeded."""
    if _fail_if_part_lost(state, job, now_s):
        return
    start_joining_parts(state, job, now_s)
    if all(part.state == "succeeded" for part in job.remaining_parts() if part.committed):
        count_success(state, job)
        stop_attempt(state, job, "succeeded", "trained to the end", now_s)


def _advance_stopping(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Update the cause of the failure if a part explains it better; finish once all parts are released.

    A site that only lost a peer may report first; the site with the cause reports before the attempt ends.
    """
    if job.fault is not None and job.state_after_stop in ("waiting", "failed") and job.saved_step is None:
        part = _root_cause(job.current_parts())
        if is_closer_to_root_cause(part.fault, job.fault):
            job.restarts -= job.state_after_stop == "waiting" and job.fault != "evicted"
            _fail_for_part(state, job, part, now_s)
    if job.state == "stopping":
        end_if_released(state, job, now_s)


ADVANCE_BY_STATE: dict[JobState, Callable[[PoolState, JobRecord, float], None]] = {
    "waiting": _advance_queued,
    "blocked": _advance_queued,
    "preempting": advance_preemption,
    "preparing": _advance_preparing,
    "starting": _advance_starting,
    "running": _advance_running,
    "stopping": _advance_stopping,
}
"""For each state, the function that advances a job from it."""


def _fail_if_part_lost(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Fail the attempt if a part was lost after the commit without which it cannot go on; return whether one was."""
    lost = [part for part in job.remaining_parts() if part.state in ("refused", "failed", "released")]
    lost = [part for part in lost if not let_part_go(state, job, part, part_failure_text(part), now_s)]
    if lost:
        _fail_for_part(state, job, _root_cause(lost), now_s)
    return bool(lost)


def _root_cause(parts: list[PartRecord]) -> PartRecord:
    """Return the first part whose fault explains the failure best."""
    found = parts[0]
    for part in parts[1:]:
        found = part if is_closer_to_root_cause(part.fault, found.fault) else found
    return found


def _fail_for_part(state: PoolState, job: JobRecord, part: PartRecord, now_s: float) -> None:
    reason = f"{part.cluster} {part_failure_text(part)}"
    lost_by = _owner_at_fault(state, part)
    fail_attempt(state, job, reason, now_s, part.fault or "own", cluster=part.cluster, lost_by=lost_by)


def _owner_at_fault(state: PoolState, part: PartRecord) -> str:
    """Return the owner of a part that was lost by the site, not by the job; "" for a fault of the job.

    A fault of the job has a cause that the site reports. A site that refuses, evicts or forgets a part, that is lost
    with it, or that has no contact with the server when it fails, has lost it itself.
    """
    by_site = part.fault in (None, "evicted") or state.meter.is_away(part.job, (part.attempt, part.cluster))
    return owner_of_part(state, part) if by_site else ""
