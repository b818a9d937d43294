"""Updates of the indexes whenever a job changes its state, plan or deadline."""

from __future__ import annotations

from sortedcontainers import SortedList

from isthmus.control.state.indexes import RANK, Key
from isthmus.control.state.job_records import WAITING, JobRecord, State


def key_of(job: JobRecord) -> Key:
    """Return the job's place in the queue: by priority, then by arrival."""
    return RANK[job.priority], job.submitted_s, job.number


def of_key(state: State, key: Key) -> JobRecord:
    """Return the job of a queue key."""
    return state.jobs[state.indexes.numbers[key[2]]]


def add_job(state: State, job: JobRecord) -> None:
    """Add a new job to the indexes."""
    state.indexes.numbers[job.number] = job.id
    state.indexes.of_user.setdefault(job.user, SortedList()).add(job.number)
    file_job(state, job)


def drop_job(state: State, job: JobRecord) -> None:
    """Remove a deleted job from the indexes."""
    del state.indexes.numbers[job.number]
    state.indexes.of_user[job.user].remove(job.number)
    if not state.indexes.of_user[job.user]:
        del state.indexes.of_user[job.user]


def file_job(state: State, job: JobRecord) -> None:
    """Update every index of the job; add it to the queue or remove it, as its state requires."""
    indexes, key = state.indexes, key_of(job)
    wants_chips = wants_chips_now(job)
    if job.state not in WAITING and job.state != "planning":
        indexes.parked.discard(job.number)
    queued = wants_chips and job.number not in indexes.parked
    if queued and not job.ordered:
        indexes.order.add(key)
    elif job.ordered and not queued:
        indexes.order.remove(key)
        if job.number in indexes.keepers:
            indexes.grown = True
    if queued != job.ordered:
        job.ordered = queued
        note_change(state, job)
    if job.state == "waiting" and not job.auto and job.plan is None:
        indexes.undecided[job.number] = None
    else:
        indexes.undecided.pop(job.number, None)
    if queued and job.state in WAITING and job.plan is not None and job.deadline_s is None:
        indexes.joined[key] = None
    else:
        indexes.joined.pop(key, None)
    for index, name in ((indexes.preparing, "preparing"), (indexes.preempting, "preempting")):
        if job.state == name:
            index[job.id] = None
        else:
            index.pop(job.id, None)
    _file_end(state, job)


def note_change(state: State, job: JobRecord) -> None:
    """Record that the queue has changed from the job's place on."""
    indexes, key = state.indexes, key_of(job)
    indexes.changed = True
    indexes.changed_from = min(key, indexes.changed_from or key)


def wants_chips_now(job: JobRecord) -> bool:
    """Return whether a job belongs in the queue: it waits and has a plan or the policy `auto`."""
    if job.state == "planning":
        return job.auto
    return job.state in WAITING and (job.auto or job.plan is not None)


def park(state: State, job: JobRecord) -> None:
    """Remove a job from the queue until the pool grows: even the idle pool could not hold it."""
    state.indexes.parked.add(job.number)
    file_job(state, job)


def unpark(state: State, job: JobRecord) -> None:
    """Return a parked job to the queue."""
    state.indexes.parked.discard(job.number)
    file_job(state, job)


def set_deadline(state: State, job: JobRecord, deadline_s: float | None) -> None:
    """Set when the job's current state times out; None: never."""
    if job.deadline_s == deadline_s:
        return
    deadlines = state.indexes.timed.setdefault(job.state, SortedList())
    if job.deadline_s is not None:
        deadlines.remove((job.deadline_s, job.number))
    if deadline_s is not None:
        deadlines.add((deadline_s, job.number))
    job.deadline_s = deadline_s


def _file_end(state: State, job: JobRecord) -> None:
    """Update the expected end of a running job, if its plan predicts one."""
    ends_s = job.began_s + job.run_s if job.state == "running" and job.run_s else None
    if ends_s == job.ends_s:
        return
    if job.ends_s is not None:
        state.indexes.ending.remove((job.ends_s, job.number))
    if ends_s is not None:
        state.indexes.ending.add((ends_s, job.number))
    job.ends_s = ends_s
