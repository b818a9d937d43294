"""`indexes_agree`: the incremental indexes equal those computed from the records."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.state.job_records import WAITING, JobRecord, State
from isthmus.control.state.queue_index import key_of, wants_chips_now


def indexes_agree(state: State) -> Iterator[str]:
    """Yield a message for each index that differs from its value computed from the records."""
    indexes, jobs = state.indexes, state.jobs.values()
    waiting = [job for job in jobs if job.number not in indexes.parked and wants_chips_now(job)]
    wanted = {
        "ids_by_number": (dict(indexes.numbers), {job.number: job.id for job in jobs}),
        "order": (list(indexes.order), sorted(key_of(job) for job in waiting)),
        "awaiting_choice": (
            set(indexes.undecided),
            {job.number for job in jobs if job.state == "waiting" and not job.auto and job.plan is None},
        ),
        "preparing": (set(indexes.preparing), {job.id for job in jobs if job.state == "preparing"}),
        "preempting": (set(indexes.preempting), {job.id for job in jobs if job.state == "preempting"}),
        "preemptors": (set(indexes.claiming), {job.id for job in jobs if job.victims}),
        "auto_planning": (indexes.asked, {job.id for job in jobs if job.auto and job.asked is not None}),
        "deadlines": (
            {(name, number) for name, book in indexes.timed.items() for _, number in book},
            {(job.state, job.number) for job in jobs if job.deadline_s is not None},
        ),
        "expected_ends": ([n for _, n in indexes.ending], [job.number for job in _ending(state)]),
        "numbers_by_user": (
            {user: list(numbers) for user, numbers in indexes.of_user.items()},
            _of_user(state),
        ),
    }
    for name, (found, right) in wanted.items():
        if found != right:
            yield f"index '{name}' is {found}, computed from the records it is {right}"
    waits = {job.number for job in jobs if job.state in WAITING or job.state == "planning"}
    if not (indexes.parked | set(indexes.curious) | {key[2] for key in indexes.unplanned}) <= waits:
        yield "a job that does not wait is parked, or waits to be planned"
    if indexes.joined or indexes.grown or indexes.widened:
        yield "a change of queue or capacity was not processed"


def _ending(state: State) -> list[JobRecord]:
    running = [job for job in state.jobs.values() if job.state == "running" and job.run_s]
    return sorted(running, key=lambda job: (job.began_s + job.run_s, job.number))


def _of_user(state: State) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for job in state.jobs.values():
        found.setdefault(job.user, []).append(job.number)
    return {user: sorted(numbers) for user, numbers in found.items()}
