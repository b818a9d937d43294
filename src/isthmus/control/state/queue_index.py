"""A job's place in the queue and in the books of time, brought up to date whenever the job has moved."""

from __future__ import annotations

from sortedcontainers import SortedList

from isthmus.control.state.indexes import RANK, Key
from isthmus.control.state.job_records import WAITING, JobRecord, State


def key_of(job: JobRecord) -> Key:
    """Return the job's place in the queue: by priority, then as it came."""
    return RANK[job.priority], job.submitted_s, job.number


def of_key(state: State, key: Key) -> JobRecord:
    """Return the job that stands at a place of the queue."""
    return state.jobs[state.indexes.numbers[key[2]]]


def add_job(state: State, job: JobRecord) -> None:
    """Take a new job into the books."""
    state.indexes.numbers[job.number] = job.id
    state.indexes.of_user.setdefault(job.user, SortedList()).add(job.number)
    file_job(state, job)


def drop_job(state: State, job: JobRecord) -> None:
    """Take a deleted job out of the books."""
    del state.indexes.numbers[job.number]
    state.indexes.of_user[job.user].remove(job.number)
    if not state.indexes.of_user[job.user]:
        del state.indexes.of_user[job.user]


def file_job(state: State, job: JobRecord) -> None:
    """Put the job into the queue where its state belongs there, and take it out where not."""
    books, key = state.indexes, key_of(job)
    wants_chips = wants_chips_now(job)
    if job.state not in WAITING and job.state != "planning":
        books.parked.discard(job.number)
    queued = wants_chips and job.number not in books.parked
    if queued and not job.ordered:
        books.order.add(key)
    elif job.ordered and not queued:
        books.order.remove(key)
        if job.number in books.keepers:
            books.grown = True
    if queued != job.ordered:
        job.ordered = queued
        note_change(state, job)
    if job.state == "waiting" and not job.auto and job.plan is None:
        books.undecided[job.number] = None
    else:
        books.undecided.pop(job.number, None)
    if queued and job.state in WAITING and job.plan is not None and job.deadline_s is None:
        books.joined[key] = None
    else:
        books.joined.pop(key, None)
    for book, name in ((books.preparing, "preparing"), (books.preempting, "preempting")):
        if job.state == name:
            book[job.id] = None
        else:
            book.pop(job.id, None)
    _file_end(state, job)


def note_change(state: State, job: JobRecord) -> None:
    """Note that the queue is another from the job's place on."""
    books, key = state.indexes, key_of(job)
    books.changed = True
    books.changed_from = min(key, books.changed_from or key)


def wants_chips_now(job: JobRecord) -> bool:
    """Tell whether a job has its place in the queue: it has a plan, or takes one by itself."""
    if job.state == "planning":
        return job.auto
    return job.state in WAITING and (job.auto or job.plan is not None)


def park(state: State, job: JobRecord) -> None:
    """Take a job out of the queue until the pool has more: not even all of it could hold the job now."""
    state.indexes.parked.add(job.number)
    file_job(state, job)


def unpark(state: State, job: JobRecord) -> None:
    """Put a parked job back into the queue."""
    state.indexes.parked.discard(job.number)
    file_job(state, job)


def set_deadline(state: State, job: JobRecord, deadline_s: float | None) -> None:
    """Set when the job's present state has lasted too long; None for never."""
    if job.deadline_s == deadline_s:
        return
    book = state.indexes.timed.setdefault(job.state, SortedList())
    if job.deadline_s is not None:
        book.remove((job.deadline_s, job.number))
    if deadline_s is not None:
        book.add((deadline_s, job.number))
    job.deadline_s = deadline_s


def _file_end(state: State, job: JobRecord) -> None:
    """Note when a running job should end, where its plan tells."""
    ends_s = job.began_s + job.run_s if job.state == "running" and job.run_s else None
    if ends_s == job.ends_s:
        return
    if job.ends_s is not None:
        state.indexes.ending.remove((job.ends_s, job.number))
    if ends_s is not None:
        state.indexes.ending.add((ends_s, job.number))
    job.ends_s = ends_s
