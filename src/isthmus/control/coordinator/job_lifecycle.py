"""The state machine of a job: a table `(from, to): action`. A transition that is not in it raises.

planning -> choosing -> waiting -> preparing -> starting -> running -> stopping -> succeeded
(plans; user's choice; chips allocated; held at all sites; checked in; trained; released at all sites)

waiting | blocked -> preempting -> preparing
(the user agrees to preempt; all sites ready and all victims' checkpoints verified; victims leave)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.control.state import ledger
from isthmus.control.state.job_records import JobRecord, State
from isthmus.control.state.queue_index import file_job, note_change, set_deadline
from isthmus.control.state.site_records import PartRecord
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.messages.agent_messages import Desired, RankMap, Victim
from isthmus.core.messages.api_views import JobState

JobStep = Callable[[State, JobRecord, float], float | None]
"""Performs the transition; returns when the new state times out, None for never."""


def move(state: State, job: JobRecord, to: JobState, now_s: float, reason: str = "") -> None:
    """Move `job` to the state `to`; raise `IllegalTransitionError` if the table lacks the transition."""
    step = JOB_STEPS.get((job.state, to))
    if step is None:
        raise IllegalTransitionError(
            f"job {job.id}: no step from {job.state} to {to}; its history: " + " | ".join(job.story or ()),
            hint="this is a bug: please report it with the message",
        )
    job.tell(f"{now_s:.3f} {job.state} -> {to} (attempt {job.attempt}) {reason}".rstrip())
    set_deadline(state, job, None)
    deadline_s = step(state, job, now_s)
    job.state, job.reason, job.changed_s = to, reason, now_s
    set_deadline(state, job, deadline_s)
    file_job(state, job)
    state.touched.add(job.id)


def open_attempt(state: State, job: JobRecord, desired: Desired) -> None:
    """Open the next attempt: a part at every cluster of the plan."""
    if job.plan is None:
        raise IllegalTransitionError(
            f"job {job.id}: an attempt without a plan; its history: {list(job.story or ())}"
        )
    job.attempt += 1
    job.rank_map, job.fault, job.saved_step = None, None, None
    job.parts = {key: part for key, part in job.parts.items() if part.state != "released"}
    for cut in job.cuts:
        part = PartRecord(
            job=job.id,
            attempt=job.attempt,
            cluster=cut.cluster,
            ranks=cut.ranks,
            chips=dict(cut.chips),
            storage_bytes=ledger.storage_at(job.plan, cut.cluster),
            desired=desired,
        )
        job.parts[job.attempt, cut.cluster] = part
        record = state.clusters[cut.cluster]
        record.parts[job.id, job.attempt] = part
        record.reported.pop((job.id, job.attempt), None)


def enqueue(state: State, job: JobRecord) -> None:
    """Put a part of the job into the queue of each of its sites; a queued part holds no chips."""
    open_attempt(state, job, "queued")
    job.enqueued = True
    state.touched.add(job.id)


def dequeue(state: State, job: JobRecord) -> None:
    """Remove the job from the queues of its sites."""
    if job.enqueued:
        job.enqueued = False
        _release(state, job, 0.0)
        note_change(state, job)
        state.touched.add(job.id)


def _settle(_state: State, _job: JobRecord, _now_s: float) -> None:
    """Do nothing; the new state has no timeout."""


def _offer(state: State, job: JobRecord, _now_s: float) -> None:
    """Discard the plan, so that the user can choose again."""
    dequeue(state, job)
    ledger.give_plan(state, job, None)


def _wait_out(state: State, job: JobRecord, now_s: float) -> float | None:
    """Wait after an attempt; with a back-off if a site refused."""
    _leave(state, job)
    return now_s + state.rules.backoff_s(job.refusals) if job.refusals else None


def _hold(state: State, job: JobRecord, now_s: float) -> float:
    """Allocate the resources of all parts at once."""
    _begin(state, job, "prepared")
    ledger.promise(state, job, job.present())
    return now_s + state.rules.reservation_s


def _claim(state: State, job: JobRecord, now_s: float) -> float:
    """Allocate the free chips, and order every site to keep its victims' chips for the job."""
    _begin(state, job, "ready")
    state.indexes.claiming[job.id] = None
    for part in job.present():
        _borrow(state, job, part)
    ledger.promise(state, job, job.present())
    for one in job.victims:
        if one.attempt:
            state.jobs[one.job].victim_of = job.id
    return now_s + state.rules.reservation_s


def _begin(state: State, job: JobRecord, desired: Desired) -> None:
    """Continue with the attempt in the site queues, or open one."""
    if not job.enqueued:
        open_attempt(state, job, desired)
    job.enqueued = False
    for part in job.present():
        part.desired = desired


def _borrow(state: State, job: JobRecord, part: PartRecord) -> None:
    """Choose the sources of a part's chips: free ones first, then pool victims, then local jobs."""
    record = state.clusters[part.cluster]
    named = [one for one in job.victims if one.cluster == part.cluster]
    part.victims = tuple(Victim(job=one.job, attempt=one.attempt) for one in named)
    from_pool = [record.parts[one.job, one.attempt] for one in named if one.attempt]
    for group, chips in part.chips.items():
        rest = chips - min(chips, record.free_of(group))
        available = sum(each.chips.get(group, 0) for each in from_pool)
        if rest:
            part.borrowed[group] = min(rest, available)
            part.local[group] = rest - part.borrowed[group]


def _evict(state: State, job: JobRecord, now_s: float) -> float:
    """Order the sites to hold the chips as the victims leave."""
    for part in job.present():
        part.desired = "prepared"
    return now_s + state.rules.evict_s


def _commit(state: State, job: JobRecord, now_s: float) -> float:
    """Order every site to run its part."""
    job.refusals = 0
    for part in job.present():
        part.desired, part.committed = "running", True
    return now_s + state.rules.start_s


def _connect(state: State, job: JobRecord, now_s: float) -> None:
    """Build the rank map from the workers that have checked in, and fix the plan."""
    workers = sorted((worker for part in job.present() for worker in part.workers), key=lambda w: w.rank)
    job.rank_map, job.ran, job.pinned = RankMap(workers=tuple(workers)), True, True
    job.began_s, job.trained_at = now_s, tuple(part.cluster for part in job.present())
    _free_victims(state, job)


def _release(_state: State, job: JobRecord, _now_s: float) -> None:
    """Order the release of every part."""
    for part in job.parts.values():
        part.desired = "released"


def _undo(state: State, job: JobRecord, now_s: float) -> None:
    """Order the release of every part, and clear the victims, which continue to train."""
    _release(state, job, now_s)
    _free_victims(state, job)


def _end(state: State, job: JobRecord, now_s: float) -> None:
    """Remove an ended job from the queue."""
    _release(state, job, now_s)
    job.enqueued = False
    _leave(state, job)
    job.needs, job.cuts, job.request = None, (), None
    del state.live[job.id]


def _leave(state: State, job: JobRecord) -> None:
    """Release the attempt's links and victims."""
    ledger.release_links(state, job)
    _free_victims(state, job)
    job.victim_of = None


def _free_victims(state: State, job: JobRecord) -> None:
    """Clear the job's victims, so that other jobs may preempt them."""
    for one in job.victims:
        victim = state.jobs.get(one.job) if one.attempt else None
        if victim is not None and victim.victim_of == job.id:
            victim.victim_of = None
            for part in victim.present():
                part.protect = False
    job.victims = ()
    state.indexes.claiming.pop(job.id, None)


JOB_STEPS: Mapping[tuple[JobState, JobState], JobStep] = {
    ("planning", "choosing"): _settle,
    ("planning", "waiting"): _settle,
    ("planning", "failed"): _end,
    ("planning", "cancelled"): _end,
    ("choosing", "waiting"): _settle,
    ("choosing", "cancelled"): _end,
    ("waiting", "choosing"): _offer,
    ("waiting", "blocked"): _settle,
    ("waiting", "preparing"): _hold,
    ("waiting", "preempting"): _claim,
    ("waiting", "failed"): _end,
    ("waiting", "cancelled"): _end,
    ("blocked", "waiting"): _settle,
    ("blocked", "preparing"): _hold,
    ("blocked", "preempting"): _claim,
    ("blocked", "cancelled"): _end,
    ("preempting", "preparing"): _evict,
    ("preempting", "stopping"): _undo,
    ("preparing", "starting"): _commit,
    ("preparing", "stopping"): _release,
    ("starting", "running"): _connect,
    ("starting", "stopping"): _release,
    ("running", "stopping"): _release,
    ("stopping", "waiting"): _wait_out,
    ("stopping", "succeeded"): _end,
    ("stopping", "failed"): _end,
    ("stopping", "cancelled"): _end,
}
"""Every transition of a job. Only `_hold` and `_claim` allocate chips."""
