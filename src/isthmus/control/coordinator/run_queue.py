"""`run_queue`: who starts now, for whom chips are kept, who stands in sites' queues, who is planned anew.

After something has become free, the head of the queue is weighed as a whole (`global_order`). A job that has
only just joined it starts where it fits beside what is kept for others: nothing else has changed.
"""

from __future__ import annotations

from itertools import islice

from isthmus.control.algorithms.global_order import Release, Request, global_order
from isthmus.control.coordinator.job_lifecycle import enqueue, move
from isthmus.control.coordinator.plan_requests import (
    could_help,
    next_requests,
    want_plans,
    wants_plans,
    withdraw,
)
from isthmus.control.coordinator.wound_wait import wound
from isthmus.control.state import ledger
from isthmus.control.state.indexes import Key
from isthmus.control.state.job_records import WAITING, JobRecord, State
from isthmus.control.state.queue_index import key_of, of_key, park, unpark

REPLANNED = 16
"""So many waiting jobs, the first of the queue, are planned again when something has become free."""

RELEASES = 64
"""So many runs, the first to end, are looked at to see when a reservation can begin."""


def run_queue(state: State, now_s: float) -> list[JobRecord]:
    """Do what the event in hand has made possible; return the jobs that the planner is to be asked about."""
    books = state.indexes
    if books.widened:
        _take_up_parked(state)
    if not books.grown and _start_joined(state, now_s):
        books.grown = True
    if books.grown:
        books.growths += 1
        _start_best(state, now_s)
    if (books.changed or books.joined) and _reaches_pushed(state):
        _push(state)
    books.grown = books.widened = books.changed = False
    books.changed_from = None
    books.joined.clear()
    return next_requests(state)


def _take_up_parked(state: State) -> None:
    """Put back into the queue whom the pool as it now is could hold, or might have a plan for."""
    whole = ledger.whole_pool(state)
    for number in sorted(state.indexes.parked):
        job = state.jobs[state.indexes.numbers[number]]
        if job.plan is None or not ledger.holdable(state, job):
            if job.pinned or not could_help(job.tried_whole or job.tried_on, whole):
                continue
            want_plans(state, job)
        unpark(state, job)
    state.indexes.grown = True


def _start_joined(state: State, now_s: float) -> bool:
    """Start who has just joined and fits; tell whether somebody else must be weighed against the others."""
    books = state.indexes
    weigh = False
    for key in sorted(books.joined):
        job = of_key(state, key)
        if _stale(state, job):
            continue
        if ledger.fits(state, job.needs or {}, books.kept):
            _start(state, job, now_s)
            continue
        if job.pinned and job.state == "waiting":
            move(state, job, "blocked", now_s)
        weigh = weigh or _may_not_be_overtaken(state, job, key, now_s)
    return weigh


def _may_not_be_overtaken(state: State, job: JobRecord, key: Key, now_s: float) -> bool:
    """Tell whether chips may have to be kept for a job that does not fit."""
    if now_s - job.submitted_s > state.patience_s:
        return True
    if state.objective == "deadline":
        return job.due_s is not None
    first = min(state.indexes.keepers, default=None)
    return state.objective == "arrival" and (first is None or key < min(_keys(state)))


def _keys(state: State) -> list[Key]:
    numbers = state.indexes.numbers
    return [key_of(state.jobs[numbers[number]]) for number in state.indexes.keepers]


def _start_best(state: State, now_s: float) -> None:
    """Weigh the head of the queue: start, keep chips, make others give way."""
    books = state.indexes
    books.kept, books.keepers = {}, frozenset()
    waiting = [job for job in _head(state) if not _stale(state, job)]
    if waiting:
        _weigh(state, waiting, now_s)
    _look_elsewhere(state)


def _weigh(state: State, waiting: list[JobRecord], now_s: float) -> None:
    free: dict[str, int] = {}
    requests = _candidates(state, waiting, free, now_s)
    order = global_order(
        requests,
        free,
        state.objective,
        now_s,
        releases=_releases(state),
        patience_s=state.patience_s,
    )
    first = [*order.start, *order.reserve]
    for job in (state.jobs[job_id] for job_id in first):
        if job.id in order.start and ledger.fits(state, job.needs or {}, {}):
            _start(state, job, now_s)
            continue
        _keep(state, job)
        wound(state, job, now_s, order.start)  # who was lent what is kept is not wounded for it at once
    for job in waiting:
        if job.pinned and job.state == "waiting":
            move(state, job, "blocked", now_s)


def _candidates(state: State, waiting: list[JobRecord], free: dict[str, int], now_s: float) -> list[Request]:
    """Return who fits what is free, or may have it kept; note what is free of all that these need.

    To leave the others out changes nothing: who does not fit cannot start, and only the first keeps chips.
    One that is first by arrival alone, and waits for an owner's own work, keeps none: nobody knows how long.
    """
    found, first = list[Request](), state.objective == "arrival"
    for job in waiting:
        request = _request(job)
        for key in request.needs:
            if key not in free:
                free[key] = ledger.free_of(state, key)
        keeps = now_s - job.submitted_s > state.patience_s
        keeps = keeps or (state.objective == "deadline" and job.due_s is not None)
        if all(free[key] >= chips for key, chips in request.needs.items()):
            found.append(request)
        elif keeps or (first and not ledger.waits_for_owner(state, request.needs)):
            found.append(request)
            first = False
    return found


def _head(state: State) -> list[JobRecord]:
    """Return those of the queue's head that have a plan and may be tried now."""
    jobs = (of_key(state, key) for key in state.indexes.head(state.rules.window))
    return [job for job in jobs if job.state in WAITING and job.plan and job.deadline_s is None]


def _request(job: JobRecord) -> Request:
    if job.request is not None:
        return job.request
    job.request = Request(
        job=job.id,
        needs=ledger.chips_of(job.needs or {}),
        submitted_s=job.submitted_s,
        priority=job.priority,
        deadline_s=job.due_s,
        run_s=job.run_s,
    )
    return job.request


def _releases(state: State) -> list[Release]:
    ends = (state.indexes.ending[index] for index in range(min(RELEASES, len(state.indexes.ending))))
    jobs = ((end_s, state.jobs[state.indexes.numbers[number]]) for end_s, number in ends)
    return [Release(at_s=end_s, chips=ledger.chips_of(job.needs or {})) for end_s, job in jobs]


def _start(state: State, job: JobRecord, now_s: float) -> None:
    withdraw(state, job)
    move(state, job, "preparing", now_s)


def _keep(state: State, job: JobRecord) -> None:
    """Keep what is free of all that the job needs, up to its need, from those behind it."""
    books = state.indexes
    for key, amount in (job.needs or {}).items():
        left = ledger.free_of(state, key) - books.kept.get(key, 0)
        books.kept[key] = books.kept.get(key, 0) + max(0, min(amount, left))
    books.keepers |= {job.number}


def _stale(state: State, job: JobRecord) -> bool:
    """Tell whether the pool no longer has what the job's plan needs; it is planned anew or parked."""
    if ledger.holdable(state, job):
        return False
    if not job.pinned and (job.tried_on is None or job.tried_on != state.free()):
        if not wants_plans(state, job):
            want_plans(state, job)
    else:
        park(state, job)
    return True


def _look_elsewhere(state: State) -> None:
    """Have the first of those that still wait planned again, where enough is free for their size."""
    free = state.free()
    total = sum(chips for groups in free.values() for chips in groups.values())
    total -= sum(ledger.chips_of(state.indexes.kept).values())
    books = state.indexes
    first = [of_key(state, key) for key in books.head(REPLANNED)]
    undecided = [state.jobs[books.numbers[number]] for number in islice(books.undecided, REPLANNED)]
    for job in (*first, *undecided):
        waits = job.state == "waiting" and not job.pinned and job.deadline_s is None
        if waits and total >= _size(job) and not wants_plans(state, job) and could_help(job.tried_on, free):
            want_plans(state, job)


def _size(job: JobRecord) -> int:
    """Return the chips of the job's plan, or of the smallest that it could have."""
    if job.needs is not None:
        return sum(ledger.chips_of(job.needs).values())
    plans = job.plans.plans if job.plans else ()
    return min((sum(stage.num_chips for stage in plan.stages) for plan in plans), default=0)


def _reaches_pushed(state: State) -> bool:
    """Tell whether what has changed of the queue may change what stands in sites' queues."""
    books = state.indexes
    places = [*([books.changed_from] if books.changed_from else ()), *books.joined]
    first = min(places, default=None)
    if len(books.pushed) < state.rules.pushed:
        return first is None or books.is_head(first, state.rules.window)
    last = state.jobs.get(books.pushed[-1])
    return last is None or first is None or first <= key_of(last)


def _push(state: State) -> None:
    """Have the head of the queue stand in the queues of its sites."""
    books, found = state.indexes, list[str]()
    for key in books.head(state.rules.window):
        if len(found) == state.rules.pushed:
            break
        job = of_key(state, key)
        if job.state in WAITING and job.plan is not None and job.deadline_s is None:
            if not job.enqueued and ledger.holdable(state, job):
                enqueue(state, job)
            if job.enqueued:
                found.append(job.id)
    books.pushed = tuple(found)
