"""`indexes_agree`: what is kept up step by step is what the records say."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.state.job_records import WAITING, JobRecord, State
from isthmus.control.state.queue_index import key_of, wants_chips_now


def indexes_agree(state: State) -> Iterator[str]:
    """Yield a sentence for each index that is not what it would be if it were computed anew."""
    books, jobs = state.indexes, state.jobs.values()
    waiting = [job for job in jobs if job.number not in books.parked and wants_chips_now(job)]
    wanted = {
        "numbers": (dict(books.numbers), {job.number: job.id for job in jobs}),
        "order": (list(books.order), sorted(key_of(job) for job in waiting)),
        "undecided": (
            set(books.undecided),
            {job.number for job in jobs if job.state == "waiting" and not job.auto and job.plan is None},
        ),
        "preparing": (set(books.preparing), {job.id for job in jobs if job.state == "preparing"}),
        "preempting": (set(books.preempting), {job.id for job in jobs if job.state == "preempting"}),
        "claiming": (set(books.claiming), {job.id for job in jobs if job.victims}),
        "asked": (books.asked, {job.id for job in jobs if job.auto and job.asked is not None}),
        "timed": (
            {(name, number) for name, book in books.timed.items() for _, number in book},
            {(job.state, job.number) for job in jobs if job.deadline_s is not None},
        ),
        "ending": ([n for _, n in books.ending], [job.number for job in _ending(state)]),
        "of_user": (
            {user: list(numbers) for user, numbers in books.of_user.items()},
            _of_user(state),
        ),
    }
    for name, (found, right) in wanted.items():
        if found != right:
            yield f"the index '{name}' says {found}, the records say {right}"
    waits = {job.number for job in jobs if job.state in WAITING or job.state == "planning"}
    if not (books.parked | set(books.curious) | {key[2] for key in books.unplanned}) <= waits:
        yield "somebody who does not wait is parked, or is to be planned"
    if books.joined or books.grown or books.widened:
        yield "something that has become possible was not looked at"


def _ending(state: State) -> list[JobRecord]:
    running = [job for job in state.jobs.values() if job.state == "running" and job.run_s]
    return sorted(running, key=lambda job: (job.began_s + job.run_s, job.number))


def _of_user(state: State) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for job in state.jobs.values():
        found.setdefault(job.user, []).append(job.number)
    return {user: sorted(numbers) for user, numbers in found.items()}
