"""Why a job waits: missing resources, jobs ahead of it, expected start. Read only.

`query_job` and `query_queue` copy what they need from the state; `answer_query` then simulates the queue, which may
take 0.1 s and does not access the state. Other users' jobs appear without their ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from isthmus.control.algorithms.global_order import Objective, Release, WaitingJob
from isthmus.control.algorithms.start_forecast import RUNTIME_SPREAD, StartForecast, forecast_starts
from isthmus.control.queries.accounts.limit_refusals import limit_refusal
from isthmus.control.queries.catalogue.bring_forecast import bring_times, describe_bringing
from isthmus.control.queries.forecast_inputs import (
    ProgressByJob,
    awaits_choice,
    expected_releases,
    is_pending,
    waiting_job_of,
    wanted_needs,
    wanted_parts,
    wanted_plan,
)
from isthmus.control.queries.peer_checks import describe_unreached
from isthmus.control.queries.shortages import refusals, shortages
from isthmus.control.state import allocations
from isthmus.control.state.job_records import NO_PLAN_AT_ALL, JobRecord, PoolState
from isthmus.control.state.queue_order import is_fair, queue_head, queue_place, queue_slice, share_note
from isthmus.control.state.update_indexes import is_checking, job_at_key, queue_key
from isthmus.core.errors import InputError
from isthmus.core.plan import Plan
from isthmus.core.pool_resource import PoolResource
from isthmus.core.views.queue_status import JobAhead, QueueStatus

FORECAST_HEAD = 256
"""Jobs from the head of the queue that are simulated; later ones have a place and no times."""

MAX_FAIR_DEPTH = 20_000
"""Deepest place at which a page of a queue by fair share begins: each place before it is computed."""

FORECAST_NOTES = (
    f"times use the predicted or measured step times; the range covers deviations of {RUNTIME_SPREAD:.0%}",
    "future jobs, failures and capacity changes by owners are not included",
)
NO_FORECAST_NOTES = ("no expected start: it waits for jobs of unknown duration, or is too far back in the queue",)


@dataclass(frozen=True, kw_only=True)
class WaitQuery:
    """Statuses without times, and the copy of the queue that determines the times."""

    statuses: tuple[QueueStatus, ...]
    # The jobs to simulate.
    waiting: tuple[WaitingJob, ...]
    # Free chips.
    free: Mapping[PoolResource, int]
    releases: tuple[Release, ...]
    # The jobs of the queue by id, as the viewer may see them.
    jobs_ahead: Mapping[str, JobAhead]
    # The seconds until the sites of a job have brought its model and data, by job id.
    bring_times_s: Mapping[str, float]
    now_s: float
    objective: Objective
    patience_s: float


def query_job(state: PoolState, job: JobRecord, now_s: float, progress: ProgressByJob, viewer: str | None) -> WaitQuery:
    """Return the query for the status of `job`, which need not be in `state`; `viewer` None is an operator.

    A job with candidate plans and no chosen one is assumed to wait for the first.
    """
    others = [one for one in _queue_head(state) if one.id != job.id]
    counts = is_pending(job) and _pool_can_hold(state, job)
    waiting = others
    if counts:
        before = set(queue_head(state, queue_place(state, job) - 1))
        num_before = sum(queue_key(one) in before for one in others)
        waiting = [*others[:num_before], job, *others[num_before:]]
    return _build_query(state, [job], waiting, now_s, progress, viewer)


def query_queue(
    state: PoolState, now_s: float, progress: ProgressByJob, viewer: str | None, limit: int = 100
) -> WaitQuery:
    """Return the query for the first `limit` pending jobs of the viewer; None is an operator."""
    every = _pending_jobs_of(state, viewer) if viewer is not None else _pending_jobs(state)
    return _build_query(state, islice(every, limit), _queue_head(state), now_s, progress, viewer)


def query_queue_page(
    state: PoolState, now_s: float, progress: ProgressByJob, viewer: str | None, start: int, count: int
) -> tuple[WaitQuery, int]:
    """Return the query for the jobs of the viewer with a place in the queue, from the one at `start` on; their number.

    Raises `InputError` for a page deep in a queue that is ordered by fair share.
    """
    if viewer is None and is_fair(state) and start > MAX_FAIR_DEPTH:
        raise InputError(
            f"pages end at place {MAX_FAIR_DEPTH:,} of a queue that is ordered by fair share, not at {start:,}",
            hint="GET /v1/jobs/ID/queue returns the place of any job",
        )
    keys, length = queue_slice(state, start, count, viewer)
    asked = [job_at_key(state, key) for key in keys]
    return _build_query(state, asked, _queue_head(state), now_s, progress, viewer), length


def answer_query(query: WaitQuery) -> tuple[QueueStatus, ...]:
    """Return the statuses with their times."""
    found = forecast_starts(
        query.waiting,
        query.free,
        query.releases,
        query.objective,
        query.now_s,
        patience_s=query.patience_s,
    )
    return tuple(_with_forecast(one, found.get(one.id), query) for one in query.statuses)


def _pending_jobs(state: PoolState) -> Iterator[JobRecord]:
    """Yield the pending jobs: in the order of the queue, then those outside of it."""
    for key in queue_head(state):
        yield job_at_key(state, key)
    yield from (job for job in state.live_jobs.values() if is_pending(job) and not job.in_queue)


def _pending_jobs_of(state: PoolState, user: str) -> Iterator[JobRecord]:
    """Yield a user's pending jobs in the same order."""
    jobs = (state.jobs[state.indexes.ids_by_number[number]] for number in state.indexes.numbers_by_user.get(user, ()))
    mine = [job for job in jobs if is_pending(job)]
    return iter(sorted(mine, key=lambda job: (not job.in_queue, queue_key(job))))


def _queue_head(state: PoolState) -> list[JobRecord]:
    """Return the jobs at the head of the queue that the idle pool could hold."""
    jobs = (job_at_key(state, key) for key in queue_head(state, FORECAST_HEAD))
    return [job for job in jobs if not awaits_choice(job) and _pool_can_hold(state, job)]


def _pool_can_hold(state: PoolState, job: JobRecord) -> bool:
    return wanted_plan(job) is not None and allocations.has_capacity(state, wanted_parts(job))


def _build_query(
    state: PoolState,
    jobs: Iterable[JobRecord],
    waiting: Sequence[JobRecord],
    now_s: float,
    progress: ProgressByJob,
    viewer: str | None,
) -> WaitQuery:
    asked = list(jobs)
    plans = [(job, plan) for job in waiting if (plan := wanted_plan(job)) is not None]
    return WaitQuery(
        statuses=tuple(_queue_status(state, job) for job in asked),
        waiting=tuple(
            waiting_job_of(job, plan, progress, turn if is_fair(state) else 0) for turn, (job, plan) in enumerate(plans)
        ),
        free={
            PoolResource.chips(name, group): number
            for name, groups in state.free_chips().items()
            for group, number in groups.items()
        },
        releases=tuple(expected_releases(state, now_s, progress)),
        jobs_ahead={job.id: _job_ahead(job, viewer) for job in waiting},
        bring_times_s=bring_times(state, asked),
        now_s=now_s,
        objective=state.objective,
        patience_s=state.patience_s,
    )


def _queue_status(state: PoolState, job: JobRecord) -> QueueStatus:
    plan = wanted_plan(job)
    refused = job.plans.refused if job.plans and plan is None else ()
    if plan is not None and is_pending(job):
        refused = (*refusals(state, wanted_needs(job)), *refused)
    notes = [f"as if plan {plan.id} were chosen now"] if plan is not None and awaits_choice(job) else []
    if is_fair(state) and is_pending(job):
        notes.append(share_note(state, job))
    if is_pending(job) and (bringing := describe_bringing(state, job)):
        notes.append(f"{bringing} before it starts")
    return QueueStatus(
        id=job.id,
        name=job.submission.job.name,
        user=job.user,
        state=job.state,
        priority=job.priority,
        submitted_s=job.submitted_s,
        reason=_reason(state, job, plan),
        place=_queue_place(state, job),
        refused=refused,
        needs={cut.cluster: dict(cut.chips) for cut in wanted_parts(job)} if is_pending(job) else {},
        notes=tuple(notes),
    )


def _queue_place(state: PoolState, job: JobRecord) -> int | None:
    """Return the job's place in the queue from 1, or the place it would have if it were submitted now."""
    if not job.in_queue and (job.id in state.jobs or not _pool_can_hold(state, job)):
        return None
    return queue_place(state, job)


def _with_forecast(status: QueueStatus, forecast: StartForecast | None, query: WaitQuery) -> QueueStatus:
    """Return the status with its times and the jobs ahead."""
    if forecast is None:
        return status
    times = (
        ("start_s", forecast.start_s),
        ("earliest_s", forecast.earliest_s),
        ("latest_s", forecast.latest_s),
    )
    ready_s = query.now_s + query.bring_times_s.get(status.id, 0.0)
    known = {name: max(at_s, ready_s) for name, at_s in times if not math.isinf(at_s)}
    ahead = tuple(query.jobs_ahead[job] for job in forecast.ahead)
    notes = (*(FORECAST_NOTES if "start_s" in known else NO_FORECAST_NOTES), *status.notes)
    return status.model_copy(update={"ahead": ahead, "notes": notes, **known})


def _job_ahead(job: JobRecord, viewer: str | None) -> JobAhead:
    known = viewer is None or job.user == viewer
    return JobAhead(job=job.id if known else None, state=job.state, priority=job.priority)


def _reason(state: PoolState, job: JobRecord, plan: Plan | None) -> str:
    """Describe briefly what the job waits for; `QueueStatus.refused` has the details."""
    if not is_pending(job) or job.state == "preempting":
        return job.reason
    if job.capped_by and (refusal := limit_refusal(state, job)):
        return refusal.text
    if plan is None:
        if job.reason.startswith(NO_PLAN_AT_ALL):
            return NO_PLAN_AT_ALL
        return "waiting for the planner" if job.state == "planning" else "no plan fits the free resources"
    if not allocations.has_capacity(state, wanted_parts(job)):
        return f"the connected pool cannot hold plan {plan.id}"
    if awaits_choice(job):
        return f"the user must choose one of {len(job.plans.plans if job.plans else ())} plans"
    where = dict.fromkeys(
        f"{one.resource.cluster} > {one.resource.name}" if one.resource.kind == "link" else one.resource.cluster
        for one in shortages(state, wanted_needs(job))
    )
    if where:
        moves = _describe_moves(state, job)
        return f"{plan.id} waits for resources at {', '.join(where)}" + (f"; {moves}" if moves else "")
    if bringing := describe_bringing(state, job):
        return f"waits for its model and data: {bringing}"
    if is_checking(job) and job.preflight is not None:
        return f"{', '.join(job.preflight.waits_for)} must check the job's files and storage before it starts"
    if not allocations.fits(state, job.needs or {}, state.indexes.reserved):
        return "the resources are free, but reserved for jobs ahead of it"
    if moves := _describe_moves(state, job):
        return moves
    return describe_unreached(state, wanted_parts(job)) or "the resources are free: it starts next"


def _describe_moves(state: PoolState, job: JobRecord) -> str:
    """Return which moves of other jobs would make room for the job, without their names; "" without a proposal."""
    for name in sorted(state.proposing):
        for one in state.clusters[name].moves:
            if one.job == job.id:
                return f"{name} has the devices, in fragments: moving {len(one.moved)} running jobs would make room"
    return ""
