"""The life of a job, as a table `(from, to): what happens on the way`. A step that it lacks raises.

planning -> choosing -> waiting -> preparing -> starting -> running -> stopping -> succeeded
(plans; the user's choice; chips; held everywhere; checked in; trained; released everywhere)

waiting | blocked -> preempting -> preparing
(a chosen plan does not fit; every owner is ready and every victim protected; victims leave)
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
"""Does what the step asks for; returns when the new state has lasted too long, None for never."""


def move(state: State, job: JobRecord, to: JobState, now_s: float, reason: str = "") -> None:
    """Take `job` to the state `to`; raise `IllegalTransitionError` where the table has no such step."""
    step = JOB_STEPS.get((job.state, to))
    if step is None:
        raise IllegalTransitionError(
            f"job {job.id}: no step from {job.state} to {to}; its story: " + " | ".join(job.story or ()),
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
    """Begin the next attempt: a part at every cluster of the plan."""
    if job.plan is None:
        raise IllegalTransitionError(
            f"job {job.id}: an attempt without a plan; its story: {list(job.story or ())}"
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
    """Have a part of the job stand in the queue of each of its sites; it holds nothing there."""
    open_attempt(state, job, "queued")
    job.enqueued = True
    state.touched.add(job.id)


def dequeue(state: State, job: JobRecord) -> None:
    """Take the job out of its sites' queues."""
    if job.enqueued:
        job.enqueued = False
        _release(state, job, 0.0)
        note_change(state, job)
        state.touched.add(job.id)


def _settle(_state: State, _job: JobRecord, _now_s: float) -> None:
    """Stay, with nothing held and nothing due."""


def _offer(state: State, job: JobRecord, _now_s: float) -> None:
    """Let the user choose anew."""
    dequeue(state, job)
    ledger.give_plan(state, job, None)


def _wait_out(state: State, job: JobRecord, now_s: float) -> float | None:
    """Wait after an attempt: at once ready to go on, unless a site refused."""
    _leave(state, job)
    return now_s + state.rules.backoff_s(job.refusals) if job.refusals else None


def _hold(state: State, job: JobRecord, now_s: float) -> float:
    """Promise every part of the plan what it needs, all at once."""
    _begin(state, job, "prepared")
    ledger.promise(state, job, job.present())
    return now_s + state.rules.reservation_s


def _claim(state: State, job: JobRecord, now_s: float) -> float:
    """Promise what is free, and have every site keep the rest, which is its victims', for the job."""
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
    """Go on with the attempt that stands in the queues, or open one."""
    if not job.enqueued:
        open_attempt(state, job, desired)
    job.enqueued = False
    for part in job.present():
        part.desired = desired


def _borrow(state: State, job: JobRecord, part: PartRecord) -> None:
    """Work out whose chips a part is to have: free ones first, then those of the pool, then local jobs'."""
    record = state.clusters[part.cluster]
    named = [one for one in job.victims if one.cluster == part.cluster]
    part.victims = tuple(Victim(job=one.job, attempt=one.attempt) for one in named)
    pools = [record.parts[one.job, one.attempt] for one in named if one.attempt]
    for group, chips in part.chips.items():
        rest = chips - min(chips, record.free_of(group))
        given = sum(each.chips.get(group, 0) for each in pools)
        if rest:
            part.borrowed[group] = min(rest, given)
            part.local[group] = rest - part.borrowed[group]


def _evict(state: State, job: JobRecord, now_s: float) -> float:
    """Every owner is ready and every victim protected: have the victims leave and the chips held."""
    for part in job.present():
        part.desired = "prepared"
    return now_s + state.rules.evict_s


def _commit(state: State, job: JobRecord, now_s: float) -> float:
    """Every site holds its part: have all of them run."""
    job.refusals = 0
    for part in job.present():
        part.desired, part.committed = "running", True
    return now_s + state.rules.start_s


def _connect(state: State, job: JobRecord, now_s: float) -> None:
    """Every rank has checked in: hand out the rank map. The plan is now the one the job trains under."""
    workers = sorted((worker for part in job.present() for worker in part.workers), key=lambda w: w.rank)
    job.rank_map, job.ran, job.pinned = RankMap(workers=tuple(workers)), True, True
    job.began_s, job.trained_at = now_s, tuple(part.cluster for part in job.present())
    _free_victims(state, job)


def _release(_state: State, job: JobRecord, _now_s: float) -> None:
    """Take every part back."""
    for part in job.parts.values():
        part.desired = "released"


def _undo(state: State, job: JobRecord, now_s: float) -> None:
    """Take every part back, and let the victims go on as if nothing had been."""
    _release(state, job, now_s)
    _free_victims(state, job)


def _end(state: State, job: JobRecord, now_s: float) -> None:
    """Leave the queue for good."""
    _release(state, job, now_s)
    job.enqueued = False
    _leave(state, job)
    job.needs, job.cuts, job.request = None, (), None
    del state.live[job.id]


def _leave(state: State, job: JobRecord) -> None:
    """Let go of what the attempt had beside its parts: links, and the victims it named."""
    ledger.release_links(state, job)
    _free_victims(state, job)
    job.victim_of = None


def _free_victims(state: State, job: JobRecord) -> None:
    """Let the victims that were named be anybody's again."""
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
"""Every step a job can take. Chips are promised in `_hold` and `_claim`, and nowhere else."""
