"""Read-only checks of an event before it is logged: is it allowed, and does it change the state?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.control.coordinator.agent_reports import report_differs
from isthmus.control.queries.preemption_victims import victims_suffice
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
from isthmus.control.state.job_records import (
    TERMINAL_STATES,
    WAITING_STATES,
    ClusterVictim,
    JobRecord,
    PoolState,
)
from isthmus.control.state.packed_submission import PackedSubmission
from isthmus.core.errors import ConflictError, NotFoundError


def admit(state: PoolState, event: Event) -> bool:
    """Return whether `event` changes `state`; raise `ConflictError` or `NotFoundError` if not allowed."""
    return _CHECKS[type(event)](state, event)


def require_job(state: PoolState, job_id: str) -> JobRecord:
    """Return a job; raise `NotFoundError` if there is none."""
    job = state.jobs.get(job_id)
    if job is None:
        raise NotFoundError(f"no job '{job_id}'", hint="`isthmus jobs` lists them")
    return job


def _submitted(state: PoolState, event: JobSubmitted) -> bool:
    known = state.jobs.get(event.job_id)
    if event.submission.key:
        known = state.jobs.get(state.ids_by_key.get((event.user, event.submission.key), event.job_id))
    if known is None:
        return True
    if known.user != event.user or known.packed != PackedSubmission.pack(event.submission):
        raise ConflictError(
            f"job {known.id} was submitted with the same key or id, but other content",
            hint="give the new job its own key",
        )
    return False


def _plans_made(state: PoolState, event: PlansMade | PlanningFailed) -> bool:
    job = state.jobs.get(event.job_id)
    return job is not None and job.planner_input is not None and job.round == event.round


def _chosen(state: PoolState, event: PlanChosen) -> bool:
    job = require_job(state, event.job_id)
    offered = [plan.id for plan in job.plans.plans] if job.plans else []
    if event.plan_id not in offered:
        raise NotFoundError(
            f"job {job.id} has no plan '{event.plan_id}'",
            hint=f"its plans: {', '.join(offered) or 'none yet'}",
        )
    if job.state == "choosing" or job.state in WAITING_STATES:
        return not (job.plan_fixed and job.plan is not None and job.plan.id == event.plan_id)
    if job.state not in TERMINAL_STATES and job.plan is not None and job.plan.id == event.plan_id:
        return False
    raise ConflictError(f"job {job.id} is {job.state}: its plan cannot be changed now")


def _agreed(state: PoolState, event: PreemptionAgreed) -> bool:
    job = require_job(state, event.job_id)
    victims = [ClusterVictim(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in event.victims]
    if job.state == "preempting" and set(job.victims) == set(victims):
        return False
    if job.state not in WAITING_STATES:
        raise ConflictError(f"job {job.id} is {job.state}: only a waiting job can preempt others")
    if job.plan is None:
        raise ConflictError(
            f"job {job.id} has no plan, so it cannot preempt other jobs",
            hint=f"choose one first: isthmus plans {job.id}",
        )
    if not victims_suffice(state, job, victims):
        raise ConflictError(
            f"the chips of these jobs no longer suffice for job {job.id}: "
            f"{', '.join(sorted({one.job for one in victims})) or 'none given'}",
            hint=f"isthmus show {job.id} lists the victims it needs now",
        )
    return True


def _cancelled(state: PoolState, event: JobCancelled) -> bool:
    job = require_job(state, event.job_id)
    if job.state == "cancelled" or (job.state == "stopping" and job.state_after_stop == "cancelled"):
        return False
    if job.state in TERMINAL_STATES or (job.state == "stopping" and job.state_after_stop == "succeeded"):
        ended = job.state if job.state in TERMINAL_STATES else job.state_after_stop
        raise ConflictError(f"job {job.id} has already {ended}")
    return True


def _deleted(state: PoolState, event: JobDeleted) -> bool:
    job = require_job(state, event.job_id)
    if job.state not in TERMINAL_STATES:
        raise ConflictError(f"job {job.id} is {job.state}", hint=f"end it first: isthmus cancel {job.id}")
    held = [part.cluster for part in job.unreleased_parts()]
    if held:
        raise ConflictError(
            f"job {job.id}: {', '.join(held)} has not yet confirmed the release of its parts",
            hint="try again when the site is connected",
        )
    return True


def _reported(state: PoolState, event: AgentReported) -> bool:
    """Return whether the report differs from the last one."""
    record = state.clusters.get(event.cluster.name)
    return record is None or not record.connected or report_differs(record, event)


def _lost(state: PoolState, event: AgentLost) -> bool:
    record = state.clusters.get(event.cluster)
    return record is not None and record.connected


def _deadline(state: PoolState, event: DeadlinePassed) -> bool:
    job = state.jobs.get(event.job_id)
    if job is None or job.state_deadline_s is None:
        return False
    return job.state == event.state and job.attempt == event.attempt


def _epoch(state: PoolState, event: EpochBegan) -> bool:
    return event.epoch > state.epoch


def _pool_set(state: PoolState, event: PoolSet) -> bool:
    now = tuple(state.links.values()), state.objective, state.patience_s
    return now != (event.links, event.objective, event.patience_s)


def _restarted(_state: PoolState, _event: Restarted) -> bool:
    return False


_CHECKS: Mapping[type[Any], Callable[[PoolState, Any], bool]] = {
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
