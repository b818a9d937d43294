"""Read-only checks of an event before it is logged: is it allowed, and does it change the state?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.control.coordinator.agent_reports import is_news
from isthmus.control.queries.victims import would_do
from isthmus.control.state.events import (
    AgentLost,
    AgentReported,
    DeadlinePassed,
    EpochBegan,
    Event,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    PoolSet,
    PreemptionAgreed,
    Restarted,
)
from isthmus.control.state.job_records import ENDED, WAITING, JobRecord, State, VictimAt
from isthmus.control.state.packed_submission import Packed
from isthmus.core.errors import ConflictError, NotFoundError


def admit(state: State, event: Event) -> bool:
    """Return whether `event` changes `state`; raise `ConflictError` or `NotFoundError` if not allowed."""
    return _QUESTIONS[type(event)](state, event)


def find(state: State, job_id: str) -> JobRecord:
    """Return a job; raise `NotFoundError` if there is none."""
    job = state.jobs.get(job_id)
    if job is None:
        raise NotFoundError(f"no job '{job_id}'", hint="`isthmus jobs` lists them")
    return job


def _submitted(state: State, event: JobSubmitted) -> bool:
    known = state.jobs.get(event.job_id)
    if event.submission.key:
        known = state.jobs.get(state.keys.get((event.user, event.submission.key), event.job_id))
    if known is None:
        return True
    if known.user != event.user or known.packed != Packed.of(event.submission):
        raise ConflictError(
            f"job {known.id} was submitted with the same key or id, but other content",
            hint="give the new job its own key",
        )
    return False


def _plans_made(state: State, event: PlansMade | PlanningFailed) -> bool:
    job = state.jobs.get(event.job_id)
    return job is not None and job.asked is not None and job.round == event.round


def _chosen(state: State, event: PlanChosen) -> bool:
    job = find(state, event.job_id)
    offered = [plan.id for plan in job.plans.plans] if job.plans else []
    if event.plan_id not in offered:
        raise NotFoundError(
            f"job {job.id} has no plan '{event.plan_id}'",
            hint=f"its plans: {', '.join(offered) or 'none yet'}",
        )
    if job.state == "choosing" or job.state in WAITING:
        return not (job.pinned and job.plan is not None and job.plan.id == event.plan_id)
    if job.state not in ENDED and job.plan is not None and job.plan.id == event.plan_id:
        return False
    raise ConflictError(f"job {job.id} is {job.state}: its plan cannot be changed now")


def _agreed(state: State, event: PreemptionAgreed) -> bool:
    job = find(state, event.job_id)
    victims = [VictimAt(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in event.victims]
    if job.state == "preempting" and set(job.victims) == set(victims):
        return False
    if job.state not in WAITING:
        raise ConflictError(f"job {job.id} is {job.state}: only a waiting job can preempt others")
    if job.plan is None:
        raise ConflictError(
            f"job {job.id} has no plan, so it cannot preempt other jobs",
            hint=f"choose one first: isthmus plans {job.id}",
        )
    if not would_do(state, job, victims):
        raise ConflictError(
            f"the chips of these jobs no longer suffice for job {job.id}: "
            f"{', '.join(sorted({one.job for one in victims})) or 'none given'}",
            hint=f"isthmus show {job.id} lists the victims it needs now",
        )
    return True


def _cancelled(state: State, event: JobCancelled) -> bool:
    job = find(state, event.job_id)
    if job.state == "cancelled" or (job.state == "stopping" and job.ending == "cancelled"):
        return False
    if job.state in ENDED or (job.state == "stopping" and job.ending == "succeeded"):
        ended = job.state if job.state in ENDED else job.ending
        raise ConflictError(f"job {job.id} has already {ended}")
    return True


def _deleted(state: State, event: JobDeleted) -> bool:
    job = find(state, event.job_id)
    if job.state not in ENDED:
        raise ConflictError(f"job {job.id} is {job.state}", hint=f"end it first: isthmus cancel {job.id}")
    held = [part.cluster for part in job.unreleased()]
    if held:
        raise ConflictError(
            f"job {job.id}: {', '.join(held)} has not yet confirmed the release of its parts",
            hint="try again when the site is connected",
        )
    return True


def _reported(state: State, event: AgentReported) -> bool:
    """Return whether the report differs from the last one."""
    record = state.clusters.get(event.cluster.name)
    return record is None or not record.connected or is_news(record, event)


def _lost(state: State, event: AgentLost) -> bool:
    record = state.clusters.get(event.cluster)
    return record is not None and record.connected


def _deadline(state: State, event: DeadlinePassed) -> bool:
    job = state.jobs.get(event.job_id)
    if job is None or job.deadline_s is None:
        return False
    return job.state == event.state and job.attempt == event.attempt


def _epoch(state: State, event: EpochBegan) -> bool:
    return event.epoch > state.epoch


def _pool_set(state: State, event: PoolSet) -> bool:
    now = tuple(state.links.values()), state.objective, state.patience_s
    return now != (event.links, event.objective, event.patience_s)


def _restarted(_state: State, _event: Restarted) -> bool:
    return False


_QUESTIONS: Mapping[type[Any], Callable[[State, Any], bool]] = {
    JobSubmitted: _submitted,
    PlansMade: _plans_made,
    PlanningFailed: _plans_made,
    PlanChosen: _chosen,
    PreemptionAgreed: _agreed,
    JobCancelled: _cancelled,
    JobDeleted: _deleted,
    AgentReported: _reported,
    AgentLost: _lost,
    DeadlinePassed: _deadline,
    EpochBegan: _epoch,
    PoolSet: _pool_set,
    Restarted: _restarted,
}
