"""Why a job waits: missing resources, jobs ahead of it, expected start. Read only.

`about_job` and `about_queue` copy what they need from the state; `answer` then simulates the queue, which may
take 0.1 s and does not access the state. Other users' jobs appear without their ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from isthmus.control.algorithms.global_order import Objective, Release, Request
from isthmus.control.algorithms.start_forecast import SPREAD, Forecast, forecast_starts
from isthmus.control.queries.expected_releases import (
    Paces,
    cuts_of,
    is_before_its_start,
    is_to_choose,
    releases,
    request_of,
    wanted_plan,
)
from isthmus.control.queries.shortages import lacking, never_holds
from isthmus.control.state import ledger
from isthmus.control.state.job_records import JobRecord, State
from isthmus.control.state.queue_index import key_of, of_key
from isthmus.core.messages.queue_status import Ahead, Standing
from isthmus.core.plan import Plan

HEAD = 256
"""Jobs from the head of the queue that are simulated; later ones have a place and no times."""

TIMES = (
    f"times use the predicted or measured step times; the range covers deviations of {SPREAD:.0%}",
    "future jobs, failures and capacity changes by owners are not included",
)
NO_TIMES = ("no expected start: it waits for jobs of unknown duration, or is too far back in the queue",)


@dataclass(frozen=True, kw_only=True)
class Question:
    """Statuses without times, and the copy of the queue that determines the times."""

    standings: tuple[Standing, ...]
    # The jobs to simulate.
    requests: tuple[Request, ...]
    # Free chips by `CLUSTER/GROUP`.
    free: Mapping[str, int]
    releases: tuple[Release, ...]
    # The jobs of the queue by id, as the viewer may see them.
    who: Mapping[str, Ahead]
    now_s: float
    objective: Objective
    patience_s: float


def about_job(state: State, job: JobRecord, now_s: float, paces: Paces, viewer: str | None) -> Question:
    """Return the query for the status of `job`, which need not be in `state`; `viewer` None is an operator.

    A job with candidate plans and no chosen one is assumed to wait for the first.
    """
    others = [one for one in _head(state) if one.id != job.id]
    counts = is_before_its_start(job) and _holdable(state, job)
    waiting = sorted([*others, job], key=key_of) if counts else others
    return _question(state, [job], waiting, now_s, paces, viewer)


def about_queue(state: State, now_s: float, paces: Paces, viewer: str | None, limit: int = 100) -> Question:
    """Return the query for the first `limit` pending jobs of the viewer; None is an operator."""
    every = _of(state, viewer) if viewer is not None else _all(state)
    return _question(state, islice(every, limit), _head(state), now_s, paces, viewer)


def answer(question: Question) -> tuple[Standing, ...]:
    """Return the statuses with their times."""
    found = forecast_starts(
        question.requests,
        question.free,
        question.releases,
        question.objective,
        question.now_s,
        patience_s=question.patience_s,
    )
    return tuple(_timed(one, found.get(one.id), question) for one in question.standings)


def _all(state: State) -> Iterator[JobRecord]:
    """Yield the pending jobs: in the order of the queue, then those outside of it."""
    for key in state.indexes.order:
        yield of_key(state, key)
    yield from (job for job in state.live.values() if is_before_its_start(job) and not job.ordered)


def _of(state: State, user: str) -> Iterator[JobRecord]:
    """Yield a user's pending jobs in the same order."""
    jobs = (state.jobs[state.indexes.numbers[number]] for number in state.indexes.of_user.get(user, ()))
    mine = [job for job in jobs if is_before_its_start(job)]
    return iter(sorted(mine, key=lambda job: (not job.ordered, key_of(job))))


def _head(state: State) -> list[JobRecord]:
    """Return the jobs at the head of the queue that the idle pool could hold."""
    jobs = (of_key(state, key) for key in state.indexes.head(HEAD))
    return [job for job in jobs if not is_to_choose(job) and _holdable(state, job)]


def _holdable(state: State, job: JobRecord) -> bool:
    return wanted_plan(job) is not None and not never_holds(state, cuts_of(job))


def _question(
    state: State,
    asked: Iterable[JobRecord],
    waiting: Sequence[JobRecord],
    now_s: float,
    paces: Paces,
    viewer: str | None,
) -> Question:
    plans = [(job, plan) for job in waiting if (plan := wanted_plan(job)) is not None]
    return Question(
        standings=tuple(_standing(state, job) for job in asked),
        requests=tuple(request_of(job, plan, paces) for job, plan in plans),
        free={f"{name}/{group}": n for name, groups in state.free().items() for group, n in groups.items()},
        releases=tuple(releases(state, now_s, paces)),
        who={job.id: _who(job, viewer) for job in waiting},
        now_s=now_s,
        objective=state.objective,
        patience_s=state.patience_s,
    )


def _standing(state: State, job: JobRecord) -> Standing:
    plan = wanted_plan(job)
    refused = job.plans.refused if job.plans and plan is None else ()
    if plan is not None and is_before_its_start(job):
        refused = (*lacking(state, cuts_of(job), job.needs or {}), *refused)
    notes = (f"as if plan {plan.id} were chosen now",) if plan is not None and is_to_choose(job) else ()
    return Standing(
        id=job.id,
        name=job.submission.job.name,
        user=job.user,
        state=job.state,
        priority=job.priority,
        submitted_s=job.submitted_s,
        reason=_reason(state, job, plan),
        place=_place(state, job),
        refused=refused,
        needs={cut.cluster: dict(cut.chips) for cut in cuts_of(job)} if is_before_its_start(job) else {},
        notes=notes,
    )


def _place(state: State, job: JobRecord) -> int | None:
    """Return the job's place in the queue from 1, or the place it would have if it were submitted now."""
    if job.ordered:
        return int(state.indexes.order.index(key_of(job))) + 1
    if job.id in state.jobs or not _holdable(state, job):
        return None
    return int(state.indexes.order.bisect_left(key_of(job))) + 1


def _timed(one: Standing, found: Forecast | None, question: Question) -> Standing:
    """Return the status with its times and the jobs ahead."""
    if found is None:
        return one
    times = (("start_s", found.start_s), ("earliest_s", found.earliest_s), ("latest_s", found.latest_s))
    known = {name: max(at_s, question.now_s) for name, at_s in times if not math.isinf(at_s)}
    ahead = tuple(question.who[job] for job in found.ahead)
    notes = (*(TIMES if "start_s" in known else NO_TIMES), *one.notes)
    return one.model_copy(update={"ahead": ahead, "notes": notes, **known})


def _who(job: JobRecord, viewer: str | None) -> Ahead:
    known = viewer is None or job.user == viewer
    return Ahead(job=job.id if known else None, state=job.state, priority=job.priority)


def _reason(state: State, job: JobRecord, plan: Plan | None) -> str:
    """Describe briefly what the job waits for; `Standing.refused` has the details."""
    if not is_before_its_start(job) or job.state == "preempting":
        return job.reason
    if plan is None:
        return "waiting for the planner" if job.state == "planning" else "no plan fits the free resources"
    if never_holds(state, cuts_of(job)):
        return f"the connected pool cannot hold plan {plan.id}"
    if is_to_choose(job):
        return f"the user must choose one of {len(job.plans.plans if job.plans else ())} plans"
    where = dict.fromkeys(
        " > ".join(one.clusters) for one in lacking(state, cuts_of(job), job.needs or {}) if one.clusters
    )
    if where:
        return f"{plan.id} waits for resources at {', '.join(where)}"
    if not ledger.fits(state, job.needs or {}, state.indexes.kept):
        return "the resources are free, but reserved for jobs ahead of it"
    return "the resources are free: it starts next"
