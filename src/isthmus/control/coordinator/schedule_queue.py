"""`schedule_queue`: starts waiting jobs, reserves chips, updates the sites' queues and requests replanning.

After capacity was freed, the head of the queue is ordered as a whole (`global_order`). If a job has only
joined the queue, it starts if it fits beside the reservations, since nothing else has changed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from isthmus.control.algorithms.global_order import Release, WaitingJob, global_order
from isthmus.control.coordinator.accounts.pause_job import begin_pause
from isthmus.control.coordinator.job_lifecycle import join_site_queues, leave_site_queues, move_job
from isthmus.control.coordinator.job_preflight import begin_preflight, may_hold_chips
from isthmus.control.coordinator.joint_preemption import begin_preemption
from isthmus.control.coordinator.moves.make_room import make_room
from isthmus.control.coordinator.moves.restart_moved import jobs_on_move, restart_moved
from isthmus.control.coordinator.plan_requests import (
    has_more_free,
    is_plan_requested,
    request_plans,
    take_due_requests,
    withdraw_plan_request,
)
from isthmus.control.coordinator.reachability import may_start
from isthmus.control.coordinator.sites.elastic_parts import order_absent_parts
from isthmus.control.coordinator.wound_wait import wound
from isthmus.control.queries.accounts.lent_chips import borrowers_below, guaranteeing_project
from isthmus.control.queries.accounts.limit_refusals import limit_refusal
from isthmus.control.queries.catalogue.catalogue_versions import missing_versions
from isthmus.control.queries.preemption_victims import find_borrowers
from isthmus.control.queries.preflight_status import executes_checks, needs_preflight
from isthmus.control.queries.sites.probation_rules import probation_refusals
from isthmus.control.state import allocations
from isthmus.control.state.indexes import QueueKey
from isthmus.control.state.job_records import WAITING_STATES, JobRecord, PoolState
from isthmus.control.state.queue_order import is_fair, queue_head
from isthmus.control.state.reconcile_log import may_start_now
from isthmus.control.state.update_indexes import (
    cap,
    claim_chips,
    is_checking,
    job_at_key,
    park,
    queue_key,
    uncap,
    unpark,
)

MAX_REPLANNED_JOBS = 16
"""Waiting jobs from the head of the queue that are replanned after capacity was freed."""

MAX_RELEASES = 64
"""Running jobs, first to end first, whose releases determine when reservations begin."""


RELEASED_AT_ONCE = 16
"""Jobs of an account that return to the queue when it has released something, first in the queue first."""


def schedule_queue(state: PoolState, now_s: float) -> list[JobRecord]:
    """Schedule after an event; return the jobs whose planner requests are sent now."""
    indexes = state.indexes
    state.shares.now_s = now_s
    if indexes.capacity_added:
        _unpark_jobs(state)
    _release_capped(state)
    if state.moved:
        restart_moved(state, now_s, lambda job: _restart(state, job, now_s))
    if state.proposing:
        make_room(state, now_s, lambda job: _may_start(state, job, now_s))
    if not indexes.capacity_freed and _start_newly_queued(state, now_s):
        indexes.capacity_freed = True
    if indexes.capacity_freed:
        indexes.freed_count += 1
        _schedule_head(state, now_s)
    for job_id in tuple(indexes.elastic):
        order_absent_parts(state, state.jobs[job_id], now_s)
    if (indexes.queue_changed or indexes.newly_queued) and _affects_advertised(state):
        _advertise(state, now_s)
    indexes.capacity_freed = indexes.capacity_added = indexes.queue_changed = False
    indexes.queue_changed_from = None
    indexes.newly_queued.clear()
    return take_due_requests(state, now_s)


def _release_capped(state: PoolState) -> None:
    """Return jobs to the queue that a limit kept out of it, of the accounts that have released something."""
    indexes = state.indexes
    for account in sorted(indexes.released_accounts):
        for job_id in tuple(state.accounts.claims.get(account, ())):
            uncap(state, state.jobs[job_id])
        for key in tuple(islice(indexes.capped.get(account, ()), RELEASED_AT_ONCE)):
            uncap(state, job_at_key(state, key))
    indexes.released_accounts.clear()


def _unpark_jobs(state: PoolState) -> None:
    """Return parked jobs to the queue if the pool can now hold their plan, or may allow another plan."""
    whole = allocations.total_chips(state)
    for number in sorted(state.indexes.parked):
        job = state.jobs[state.indexes.ids_by_number[number]]
        if job.plan is None or not allocations.pool_can_hold(state, job):
            if job.plan_fixed or not has_more_free(job.last_planned_total or job.last_planned_free, whole):
                continue
            request_plans(state, job)
        unpark(state, job)
    state.indexes.capacity_freed = True


def _start_newly_queued(state: PoolState, now_s: float) -> bool:
    """Start newly queued jobs that fit; return whether the head of the queue must be ordered as a whole."""
    indexes = state.indexes
    must_order = False
    for key in sorted(indexes.newly_queued):
        job = job_at_key(state, key)
        if _is_unholdable(state, job) or not _may_start(state, job, now_s):
            continue
        if allocations.fits(state, job.needs or {}, indexes.reserved):
            _start_or_check(state, job, now_s)
            continue
        if job.plan_fixed and job.state == "waiting":
            move_job(state, job, "blocked", now_s)
        must_order = must_order or _may_reserve(state, job, key, now_s) or guaranteeing_project(state, job) != ""
    return must_order


def _may_start(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Return whether nothing but chips keeps the job from starting; otherwise its reason says what."""
    if state.restored is not None and not may_start_now(state, job):
        return False
    if job.versions and missing_versions(state, job):
        return False
    if refusals := probation_refusals(state, job):
        job.reason = "; ".join(refusals)
        return False
    if _cap_if_limited(state, job, now_s):
        return False
    return may_start(state, job, now_s)


def _cap_if_limited(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Return whether a limit forbids the job to start; it then leaves the queue until a release."""
    refusal = limit_refusal(state, job)
    if refusal is None:
        return False
    leave_site_queues(state, job)
    job.reason = refusal.text
    guarantees = state.accounts.tree.guarantees
    borrowers = borrowers_below(state, job, refusal.account, refusal.scope) if guarantees else []
    if borrowers:
        claim_chips(state, job, refusal.account)
    cap(state, job, refusal.account)
    for one in borrowers:
        begin_pause(state, one, f"project {job.project} takes back chips that it is guaranteed", now_s, job.id)
    state.changed_jobs.add(job.id)
    return True


def _may_reserve(state: PoolState, job: JobRecord, key: QueueKey, now_s: float) -> bool:
    """Return whether a job that does not fit may reserve chips."""
    if now_s - job.submitted_s > state.patience_s:
        return True
    if state.objective == "deadline":
        return job.user_deadline_s is not None
    if is_fair(state):
        return state.objective == "arrival"
    first = min(state.indexes.reservers, default=None)
    return state.objective == "arrival" and (first is None or key < min(_reserver_keys(state)))


def _reserver_keys(state: PoolState) -> list[QueueKey]:
    numbers = state.indexes.ids_by_number
    return [queue_key(state.jobs[numbers[number]]) for number in state.indexes.reservers]


def _schedule_head(state: PoolState, now_s: float) -> None:
    """Order the head of the queue: start jobs, reserve chips, wound later jobs."""
    indexes = state.indexes
    indexes.reserved, indexes.reservers = {}, frozenset()
    for moved in jobs_on_move(state):
        _reserve_amounts(state, moved)
    held = (job for job in _queue_head(state) if not _is_unholdable(state, job))
    waiting = [job for job in held if _may_start(state, job, now_s)]
    if waiting:
        _order_and_start(state, waiting, now_s)
    _replan_waiting(state)


def _order_and_start(state: PoolState, waiting: list[JobRecord], now_s: float) -> None:
    free: allocations.Amounts = {}
    requests = _candidates(state, waiting, free, now_s)
    order = global_order(
        requests,
        free,
        state.objective,
        now_s,
        releases=_next_releases(state),
        patience_s=state.patience_s,
    )
    first = [*order.start, *order.reserve]
    for job in (state.jobs[job_id] for job_id in first):
        if job.id in order.start and allocations.fits(state, job.needs or {}, {}):
            _start_or_check(state, job, now_s)
            continue
        _reserve(state, job)
        wound(state, job, now_s, order.start)  # spare the jobs that were just backfilled
    _reclaim_guarantees(state, waiting, now_s)
    for job in waiting:
        if job.plan_fixed and job.state == "waiting" and not is_checking(job):
            move_job(state, job, "blocked", now_s)


def _reclaim_guarantees(state: PoolState, waiting: list[JobRecord], now_s: float) -> None:
    """Start the jobs that still wait within the guarantees of their projects, on chips that these lend to others.

    Such a job starts on free chips although they are reserved for others; else it preempts jobs that hold lent chips.
    """
    for job in waiting if state.accounts.tree.guarantees else ():
        if job.state not in WAITING_STATES or job.capped_by or is_checking(job) or not guaranteeing_project(state, job):
            continue
        if allocations.fits(state, job.needs or {}, {}):
            _start_or_check(state, job, now_s)
            continue
        borrowers = find_borrowers(state, job)
        if borrowers and not _cap_if_limited(state, job, now_s) and may_hold_chips(state, job, now_s):
            withdraw_plan_request(state, job)
            begin_preemption(state, job, [at for one in borrowers for at in one.victims], now_s, reclaims=True)


def _candidates(
    state: PoolState, waiting: list[JobRecord], free: allocations.Amounts, now_s: float
) -> list[WaitingJob]:
    """Return the jobs that fit or may reserve chips; add the free amounts that they need to `free`: without
    what is kept for jobs that move.

    Leaving out the other jobs does not change the order. A job that is only first by arrival and waits for an
    owner's own work reserves nothing, since the end of that work is unknown.
    """
    found, first = list[WaitingJob](), state.objective == "arrival"
    for turn, job in enumerate(waiting):
        request = _waiting_job(job)
        if is_fair(state):
            request = replace(request, turn=turn)
        fits = True
        for key, chips in request.needs.items():
            if key not in free:
                free[key] = allocations.free_amount(state, key) - state.indexes.reserved.get(key, 0)
            fits = fits and free[key] >= chips
        reserves = now_s - job.submitted_s > state.patience_s
        reserves = reserves or (state.objective == "deadline" and job.user_deadline_s is not None)
        if fits:
            found.append(request)
        elif reserves or (first and not allocations.blocked_by_owner_work(state, request.needs)):
            found.append(request)
            first = False
    return found


def _queue_head(state: PoolState) -> list[JobRecord]:
    """Return the jobs at the head of the queue that have a plan and are not in back-off."""
    jobs = (job_at_key(state, key) for key in queue_head(state, state.config.queue_window))
    return [job for job in jobs if job.state in WAITING_STATES and job.plan and job.state_deadline_s is None]


def _waiting_job(job: JobRecord) -> WaitingJob:
    if job.waiting_job is not None:
        return job.waiting_job
    job.waiting_job = WaitingJob(
        job=job.id,
        needs=allocations.chip_needs(job.needs or {}),
        submitted_s=job.submitted_s,
        priority=job.own_priority or job.priority,
        project_rank=job.project_rank,
        deadline_s=job.user_deadline_s,
        run_s=job.predicted_run_s,
    )
    return job.waiting_job


def _next_releases(state: PoolState) -> list[Release]:
    ends = (state.indexes.expected_ends[index] for index in range(min(MAX_RELEASES, len(state.indexes.expected_ends))))
    jobs = ((end_s, state.jobs[state.indexes.ids_by_number[number]]) for end_s, number in ends)
    return [Release(at_s=end_s, chips=allocations.chip_needs(job.needs or {})) for end_s, job in jobs]


def _restart(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Start a moved job on other devices."""
    if _may_start(state, job, now_s) and may_hold_chips(state, job, now_s):
        withdraw_plan_request(state, job)
        move_job(state, job, "preparing", now_s, "moved to other devices")
        state.indexes.capacity_freed = True  # what was kept for it is used now


def _start_or_check(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Start a job that fits, or reserve its chips until its sites have passed its checks."""
    if _cap_if_limited(state, job, now_s):
        return
    if not may_hold_chips(state, job, now_s):
        _reserve(state, job)
        return
    withdraw_plan_request(state, job)
    move_job(state, job, "preparing", now_s)


def _reserve(state: PoolState, job: JobRecord) -> None:
    """Reserve the free resources of the job, up to its need."""
    _reserve_amounts(state, job)
    state.indexes.reservers |= {job.number}


def _reserve_amounts(state: PoolState, job: JobRecord) -> None:
    reserved = state.indexes.reserved
    for key, amount in (job.needs or {}).items():
        left = allocations.free_amount(state, key) - reserved.get(key, 0)
        reserved[key] = reserved.get(key, 0) + max(0, min(amount, left))


def _is_unholdable(state: PoolState, job: JobRecord) -> bool:
    """Return whether the pool can no longer hold the job's plan; then replan or park the job."""
    if allocations.pool_can_hold(state, job):
        return False
    if not job.plan_fixed and (job.last_planned_free is None or job.last_planned_free != state.free_chips()):
        if not is_plan_requested(state, job):
            request_plans(state, job)
    else:
        park(state, job)
    return True


def _replan_waiting(state: PoolState) -> None:
    """Replan the first waiting jobs if enough chips are free for their size."""
    free = state.free_chips()
    total = sum(chips for groups in free.values() for chips in groups.values())
    total -= sum(allocations.chip_needs(state.indexes.reserved).values())
    indexes = state.indexes
    first = [job_at_key(state, key) for key in queue_head(state, MAX_REPLANNED_JOBS)]
    undecided = [
        state.jobs[indexes.ids_by_number[number]] for number in islice(indexes.awaiting_choice, MAX_REPLANNED_JOBS)
    ]
    for job in (*first, *undecided):
        waits = job.state == "waiting" and not job.plan_fixed and job.state_deadline_s is None
        if (
            waits
            and not is_checking(job)
            and total >= _min_chips(job)
            and not is_plan_requested(state, job)
            and has_more_free(job.last_planned_free, free)
        ):
            request_plans(state, job)


def _min_chips(job: JobRecord) -> int:
    """Return the number of chips of the job's plan, otherwise of its smallest candidate."""
    if job.needs is not None:
        return sum(allocations.chip_needs(job.needs).values())
    plans = job.plans.plans if job.plans else ()
    return min((sum(stage.num_chips for stage in plan.stages) for plan in plans), default=0)


def _affects_advertised(state: PoolState) -> bool:
    """Return whether the change of the queue may affect the sites' queues."""
    indexes = state.indexes
    if is_fair(state):
        return True
    places = [*([indexes.queue_changed_from] if indexes.queue_changed_from else ()), *indexes.newly_queued]
    first = min(places, default=None)
    if len(indexes.advertised) < state.config.num_advertised:
        return first is None or indexes.in_head(first, state.config.queue_window)
    last = state.jobs.get(indexes.advertised[-1])
    return last is None or first is None or first <= queue_key(last)


def _advertise(state: PoolState, now_s: float) -> None:
    """Put the head of the queue into the queues of its sites, and have its files checked there."""
    indexes, found = state.indexes, list[str]()
    jobs, ids = state.jobs, state.indexes.ids_by_number
    has_checks = any(executes_checks(state, cluster) for cluster in state.clusters)
    for key in queue_head(state, state.config.queue_window):
        if len(found) == state.config.num_advertised:
            break
        job = jobs[ids[key[2]]]
        if job.plan is not None and job.state in WAITING_STATES and job.state_deadline_s is None:
            if not job.in_site_queues and allocations.pool_can_hold(state, job) and may_start_now(state, job):
                join_site_queues(state, job)
            is_new = has_checks and (job.preflight is None or job.preflight.plan_id != job.plan.id)
            if is_new and needs_preflight(state, job):
                begin_preflight(state, job, now_s)
            if job.in_site_queues:
                found.append(job.id)
    indexes.advertised = tuple(found)
