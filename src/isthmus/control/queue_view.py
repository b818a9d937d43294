"""The honest queue: why a job waits, who goes first, when it should start. Questions to the state; read only.

`standing_of` answers for one job, as if it were waiting already where it is still being planned or chosen;
`queue_of` lists the queue. Other users' jobs stand in it without their names.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from isthmus.control.forecast import SPREAD, Forecast, forecast_starts
from isthmus.control.lacking import lacking, never_holds
from isthmus.control.order import Objective, Release, Request
from isthmus.control.progress import Pace
from isthmus.control.records import ENDED, JobRecord, State
from isthmus.core.plan import Plan
from isthmus.core.priority import Priority
from isthmus.core.standing import Ahead, Standing

UNDER_WAY = frozenset({"preparing", "starting", "running", "stopping"})
"""States in which a job has been promised its chips."""

HEAD = 1000
"""So many jobs of the queue are looked at; those behind them have no place yet."""

Paces = Mapping[str, Pace]

_RANK: Mapping[Priority, int] = {"high": 0, "middle": 1, "low": 2}


def is_before_its_start(job: JobRecord) -> bool:
    """Tell whether a job has neither ended nor been promised its chips."""
    return job.state not in ENDED and job.state not in UNDER_WAY


def standing_of(
    state: State,
    job: JobRecord,
    now_s: float,
    paces: Paces,
    viewer: str | None,
    objective: Objective = "arrival",
) -> Standing:
    """Return where `job` stands (it need not be in `state`); `viewer` is the user who asks, None an operator.

    A job with candidate plans and none chosen is taken to wait for the first of them.
    """
    others = [one for one in _waiting(state) if one.id != job.id]
    counts = is_before_its_start(job) and _holdable(state, job)
    found = _forecasts(state, [*others, job] if counts else others, now_s, paces, objective)
    return _standing(state, job, found.get(job.id), now_s, viewer)


def queue_of(
    state: State,
    now_s: float,
    paces: Paces,
    viewer: str | None,
    objective: Objective = "arrival",
    limit: int = 100,
) -> tuple[Standing, ...]:
    """Return the first `limit` of the viewer's jobs that do not run yet, by place, then as they came."""
    found = _forecasts(state, _waiting(state), now_s, paces, objective)
    mine = [
        job
        for job in state.live.values()
        if is_before_its_start(job) and (viewer is None or job.user == viewer)
    ]
    mine.sort(key=lambda job: (found[job.id].place if job.id in found else math.inf, job.submitted_s))
    return tuple(_standing(state, job, found.get(job.id), now_s, viewer) for job in mine[:limit])


def is_to_choose(job: JobRecord) -> bool:
    """Tell whether a job's user has yet to choose its plan."""
    return job.plan is None and not job.auto


def wanted_plan(job: JobRecord) -> Plan | None:
    """Return the plan that a job waits for: its own, else the first of its candidates."""
    return job.plan or (job.plans.plans[0] if job.plans and job.plans.plans else None)


def _waiting(state: State) -> list[JobRecord]:
    """Return the head of those that wait for chips which the pool has, be they in use: `HEAD` at most."""
    waiting = (
        job
        for job in state.live.values()
        if is_before_its_start(job) and not is_to_choose(job) and _holdable(state, job)
    )
    return heapq.nsmallest(
        HEAD, waiting, key=lambda job: (_RANK[job.submission.job.priority], job.submitted_s)
    )


def _holdable(state: State, job: JobRecord) -> bool:
    plan = wanted_plan(job)
    return plan is not None and not never_holds(state, plan)


def _forecasts(
    state: State, waiting: Iterable[JobRecord], now_s: float, paces: Paces, objective: Objective
) -> dict[str, Forecast]:
    requests = [_request(job, plan, paces) for job in waiting if (plan := wanted_plan(job)) is not None]
    free = {f"{name}/{group}": n for name, groups in state.free().items() for group, n in groups.items()}
    return forecast_starts(requests, free, _releases(state, now_s, paces), objective, now_s)


def _request(job: JobRecord, plan: Plan, paces: Paces) -> Request:
    wanted = job.submission.job
    return Request(
        job=job.id,
        needs={f"{name}/{group}": n for name, groups in _needs(plan).items() for group, n in groups.items()},
        submitted_s=job.submitted_s,
        priority=wanted.priority,
        deadline_s=job.submitted_s + wanted.deadline_s if wanted.deadline_s else None,
        run_s=_run_s(job, plan, paces),
    )


def _needs(plan: Plan) -> dict[str, dict[str, int]]:
    return {part.cluster: dict(part.chips) for part in plan.parts()}


def _run_s(job: JobRecord, plan: Plan, paces: Paces) -> float:
    """Return how long the steps still to do should take; 0 where nobody predicted it."""
    pace = paces.get(job.id, Pace(0))
    step_s = plan.predicted.iteration_s if plan.predicted else 0.0
    return max(0, job.submission.job.training.steps - pace.steps_done) * step_s


def _releases(state: State, now_s: float, paces: Paces) -> list[Release]:
    """Return the chips that jobs under way give back, each when it should end."""
    found = []
    for job in state.live.values():
        chips: dict[str, int] = {}
        for part in (part for part in job.unreleased() if part.promised):
            for group, number in part.chips.items():
                key = f"{part.cluster}/{group}"
                chips[key] = chips.get(key, 0) + number
        if chips:
            found.append(Release(at_s=_ends_s(job, now_s, paces), chips=chips))
    return found


def _ends_s(job: JobRecord, now_s: float, paces: Paces) -> float:
    """Return when a job under way should end: by its pace where it was measured, else by its prediction."""
    if job.state not in UNDER_WAY or job.state == "stopping":
        return now_s
    predicted = job.plan.predicted if job.plan else None
    step_s = predicted.iteration_s if predicted else 0.0
    pace, steps = paces.get(job.id), job.submission.job.training.steps
    if pace is not None and (pace.step_s or step_s):
        return now_s + max(0, steps - pace.steps_done) * (pace.step_s or step_s)
    if not step_s:
        return math.inf
    began_s = job.changed_s if job.state == "running" else now_s
    return max(now_s, began_s + steps * step_s)


def _standing(
    state: State, job: JobRecord, found: Forecast | None, now_s: float, viewer: str | None
) -> Standing:
    wanted, plan = job.submission.job, wanted_plan(job)
    refused = job.plans.refused if job.plans and plan is None else ()
    if plan is not None and is_before_its_start(job):
        refused = (*lacking(state, plan), *refused)
    times = (found.start_s, found.earliest_s, found.latest_s) if found else (math.inf,) * 3
    start_s, earliest_s, latest_s = (None if math.isinf(one) else max(one, now_s) for one in times)
    return Standing(
        id=job.id,
        name=wanted.name,
        user=job.user,
        state=job.state,
        priority=wanted.priority,
        submitted_s=job.submitted_s,
        reason=_reason(state, job, plan),
        place=found.place if found and not is_to_choose(job) else None,
        refused=refused,
        needs=_needs(plan) if plan and is_before_its_start(job) else {},
        ahead=tuple(_ahead(state.jobs[name], viewer) for name in found.ahead) if found else (),
        start_s=start_s,
        earliest_s=earliest_s,
        latest_s=latest_s,
        notes=_notes(job, plan, found),
    )


def _ahead(job: JobRecord, viewer: str | None) -> Ahead:
    known = viewer is None or job.user == viewer
    return Ahead(job=job.id if known else None, state=job.state, priority=job.submission.job.priority)


def _reason(state: State, job: JobRecord, plan: Plan | None) -> str:
    """Say in a few words what a job waits for; what it lacks stands beside it."""
    if not is_before_its_start(job):
        return job.reason
    if job.state == "planning":
        return "the planner is looking for plans"
    if plan is None:
        return "no plan fits what is free"
    if never_holds(state, plan):
        return f"the pool as it is connected cannot hold plan {plan.id}"
    if is_to_choose(job):
        return f"its user is to choose among {len(job.plans.plans if job.plans else ())} plans"
    where = dict.fromkeys(name for one in lacking(state, plan) for name in one.clusters)
    if where:
        return f"plan {plan.id} waits for chips at {', '.join(where)}"
    return job.reason or "what it needs is free, but kept for jobs before it, or it starts next"


def _notes(job: JobRecord, plan: Plan | None, found: Forecast | None) -> Sequence[str]:
    """Say what expected times rest on, and why there are none."""
    if found is None:
        return ()
    if math.isinf(found.start_s):
        return ("no expected start: it waits for jobs whose end nobody can tell, or stands too far back",)
    notes = [
        f"runs end when predicted, or by their pace so far; the band is {SPREAD:.0%} sooner and later",
        "jobs that are yet to come, failures, and chips that owners may take or give back are not in it",
    ]
    if is_to_choose(job) and plan is not None:
        notes.append(f"as if plan {plan.id} were chosen now")
    return tuple(notes)
