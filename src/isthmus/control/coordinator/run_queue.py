"""`run_queue`: starts waiting jobs, reserves chips, updates the sites' queues and requests replanning.

After capacity was freed, the head of the queue is ordered as a whole (`global_order`). If a job has only
joined the queue, it starts if it fits beside the reservations, since nothing else has changed.
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
"""Waiting jobs from the head of the queue that are replanned after capacity was freed."""

RELEASES = 64
"""Running jobs, first to end first, whose releases determine when reservations begin."""


def run_queue(state: State, now_s: float) -> list[JobRecord]:
    """Schedule after an event; return the jobs whose planner requests are sent now."""
    indexes = state.indexes
    if indexes.widened:
        _take_up_parked(state)
    if not indexes.grown and _start_joined(state, now_s):
        indexes.grown = True
    if indexes.grown:
        indexes.growths += 1
        _start_best(state, now_s)
    if (indexes.changed or indexes.joined) and _reaches_pushed(state):
        _push(state)
    indexes.grown = indexes.widened = indexes.changed = False
    indexes.changed_from = None
    indexes.joined.clear()
    return next_requests(state)


def _take_up_parked(state: State) -> None:
    """Return parked jobs to the queue if the pool can now hold their plan, or may allow another plan."""
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
    """Start newly queued jobs that fit; return whether the head of the queue must be ordered as a whole."""
    indexes = state.indexes
    must_order = False
    for key in sorted(indexes.joined):
        job = of_key(state, key)
        if _stale(state, job):
            continue
        if ledger.fits(state, job.needs or {}, indexes.kept):
            _start(state, job, now_s)
            continue
        if job.pinned and job.state == "waiting":
            move(state, job, "blocked", now_s)
        must_order = must_order or _may_not_be_overtaken(state, job, key, now_s)
    return must_order


def _may_not_be_overtaken(state: State, job: JobRecord, key: Key, now_s: float) -> bool:
    """Return whether a job that does not fit may reserve chips."""
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
    """Order the head of the queue: start jobs, reserve chips, wound later jobs."""
    indexes = state.indexes
    indexes.kept, indexes.keepers = {}, frozenset()
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
        wound(state, job, now_s, order.start)  # spare the jobs that were just backfilled
    for job in waiting:
        if job.pinned and job.state == "waiting":
            move(state, job, "blocked", now_s)


def _candidates(state: State, waiting: list[JobRecord], free: dict[str, int], now_s: float) -> list[Request]:
    """Return the jobs that fit or may reserve chips; add the free amounts that they need to `free`.

    Leaving out the other jobs does not change the order. A job that is only first by arrival and waits for an
    owner's own work reserves nothing, since the end of that work is unknown.
    """
    found, first = list[Request](), state.objective == "arrival"
    for job in waiting:
        request = _request(job)
        for key in request.needs:
            if key not in free:
                free[key] = ledger.free_of(state, key)
        reserves = now_s - job.submitted_s > state.patience_s
        reserves = reserves or (state.objective == "deadline" and job.due_s is not None)
        if all(free[key] >= chips for key, chips in request.needs.items()):
            found.append(request)
        elif reserves or (first and not ledger.waits_for_owner(state, request.needs)):
            found.append(request)
            first = False
    return found


def _head(state: State) -> list[JobRecord]:
    """Return the jobs at the head of the queue that have a plan and are not in back-off."""
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
    """Reserve the free resources of the job, up to its need."""
    indexes = state.indexes
    for key, amount in (job.needs or {}).items():
        left = ledger.free_of(state, key) - indexes.kept.get(key, 0)
        indexes.kept[key] = indexes.kept.get(key, 0) + max(0, min(amount, left))
    indexes.keepers |= {job.number}


def _stale(state: State, job: JobRecord) -> bool:
    """Return whether the pool can no longer hold the job's plan; then replan or park the job."""
    if ledger.holdable(state, job):
        return False
    if not job.pinned and (job.tried_on is None or job.tried_on != state.free()):
        if not wants_plans(state, job):
            want_plans(state, job)
    else:
        park(state, job)
    return True


def _look_elsewhere(state: State) -> None:
    """Replan the first waiting jobs if enough chips are free for their size."""
    free = state.free()
    total = sum(chips for groups in free.values() for chips in groups.values())
    total -= sum(ledger.chips_of(state.indexes.kept).values())
    indexes = state.indexes
    first = [of_key(state, key) for key in indexes.head(REPLANNED)]
    undecided = [state.jobs[indexes.numbers[number]] for number in islice(indexes.undecided, REPLANNED)]
    for job in (*first, *undecided):
        waits = job.state == "waiting" and not job.pinned and job.deadline_s is None
        if waits and total >= _size(job) and not wants_plans(state, job) and could_help(job.tried_on, free):
            want_plans(state, job)


def _size(job: JobRecord) -> int:
    """Return the number of chips of the job's plan, otherwise of its smallest candidate."""
    if job.needs is not None:
        return sum(ledger.chips_of(job.needs).values())
    plans = job.plans.plans if job.plans else ()
    return min((sum(stage.num_chips for stage in plan.stages) for plan in plans), default=0)


def _reaches_pushed(state: State) -> bool:
    """Return whether the change of the queue may affect the sites' queues."""
    indexes = state.indexes
    places = [*([indexes.changed_from] if indexes.changed_from else ()), *indexes.joined]
    first = min(places, default=None)
    if len(indexes.pushed) < state.rules.pushed:
        return first is None or indexes.is_head(first, state.rules.window)
    last = state.jobs.get(indexes.pushed[-1])
    return last is None or first is None or first <= key_of(last)


def _push(state: State) -> None:
    """Put the head of the queue into the queues of its sites."""
    indexes, found = state.indexes, list[str]()
    for key in indexes.head(state.rules.window):
        if len(found) == state.rules.pushed:
            break
        job = of_key(state, key)
        if job.state in WAITING and job.plan is not None and job.deadline_s is None:
            if not job.enqueued and ledger.holdable(state, job):
                enqueue(state, job)
            if job.enqueued:
                found.append(job.id)
    indexes.pushed = tuple(found)
