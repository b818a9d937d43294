"""Read-only checks of an event before it is logged, one function per kind of event (`EVENT_RULES`).

Each returns whether the event changes the state, and raises `ConflictError` or `NotFoundError` if it is not allowed.
"""

from __future__ import annotations

from isthmus.control.coordinator.agent_reports import report_differs
from isthmus.control.queries.accounts.job_project import job_project
from isthmus.control.queries.accounts.limit_refusals import limit_refusal
from isthmus.control.queries.catalogue.catalogue_versions import missing_versions
from isthmus.control.queries.enrolled_agent import admit_agent
from isthmus.control.queries.peer_checks import describe_unreached, unreached_pairs
from isthmus.control.queries.preemption_victims import victims_suffice
from isthmus.control.queries.preflight_status import has_passed_once, needs_preflight
from isthmus.control.queries.sites.probation_rules import probation_refusals
from isthmus.control.state.allocations import takes_parts
from isthmus.control.state.events import (
    AgentLost,
    AgentReported,
    DeadlinePassed,
    EpochBegan,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    LogCompacted,
    PeerCheckTimedOut,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    PoolSet,
    PreemptionAgreed,
    PreflightTimedOut,
    Restarted,
    SiteChecked,
)
from isthmus.control.state.job_records import (
    TERMINAL_STATES,
    WAITING_STATES,
    ClusterVictim,
    JobRecord,
    PoolState,
)
from isthmus.control.state.packed_submission import PackedSubmission
from isthmus.control.state.reconcile_log import hold_reason, is_awaited
from isthmus.control.state.update_indexes import is_checking
from isthmus.core.errors import ConflictError, NotFoundError
from isthmus.core.plan import Plan


def require_job(state: PoolState, job_id: str) -> JobRecord:
    """Return a job; raise `NotFoundError` if there is none."""
    job = state.jobs.get(job_id)
    if job is None:
        raise NotFoundError(f"no job '{job_id}'", hint="`isthmus jobs` lists them")
    return job


def admit_submission(state: PoolState, event: JobSubmitted) -> bool:
    """Return whether the job is new; only an equal key of the same user is the same job.

    Raises `ConflictError` if the job of that key has other content, or if the id belongs to another job.
    """
    key = (event.user, event.submission.key)
    known = state.jobs.get(state.ids_by_key.get(key, "")) if event.submission.key else None
    if known is not None:
        if known.packed == PackedSubmission.pack(event.submission):
            return False
        raise ConflictError(
            f"job {known.id} was submitted with the same key, but other content", hint="give the new job its own key"
        )
    job_project(state.accounts.tree, event.user, event.submission.job.project)
    if event.job_id in state.jobs:
        raise ConflictError(
            f"the id {event.job_id} belongs to another job", hint="submit again: each submission gets an id of its own"
        )
    return True


def admit_plans(state: PoolState, event: PlansMade | PlanningFailed) -> bool:
    """Return whether the answer is to the open planner request of the job."""
    job = state.jobs.get(event.job_id)
    return job is not None and job.planner_input is not None and job.round == event.round


def require_plan(job: JobRecord, plan_id: str) -> Plan:
    """Return a candidate plan of a job; raise `NotFoundError` if it has none with this id."""
    offered = {plan.id: plan for plan in job.plans.plans} if job.plans else {}
    if plan_id not in offered:
        raise NotFoundError(
            f"job {job.id} has no plan '{plan_id}'",
            hint=f"its plans: {', '.join(offered) or 'none yet'}",
        )
    return offered[plan_id]


def admit_choice(state: PoolState, event: PlanChosen) -> bool:
    """Return whether the plan is not yet chosen; raise if it is not offered or cannot be changed now."""
    job = require_job(state, event.job_id)
    require_plan(job, event.plan_id)
    if job.state == "choosing" or job.state in WAITING_STATES:
        return not (job.plan_fixed and job.plan is not None and job.plan.id == event.plan_id)
    if job.state not in TERMINAL_STATES and job.plan is not None and job.plan.id == event.plan_id:
        return False
    raise ConflictError(f"job {job.id} is {job.state}: its plan cannot be changed now")


def admit_preemption(state: PoolState, event: PreemptionAgreed) -> bool:
    """Return whether the preemption has not begun; raise `ConflictError` if it is not possible now."""
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
    closed = [part.cluster for part in job.plan_parts if not takes_parts(state, part.cluster)]
    if closed:
        raise ConflictError(f"job {job.id} cannot start: {', '.join(closed)} takes no parts now")
    if refusals := probation_refusals(state, job):
        raise ConflictError(f"job {job.id} cannot start: {'; '.join(refusals)}")
    if hold_reason(state, job):
        raise ConflictError(f"job {job.id} cannot start: {hold_reason(state, job)}")
    if unreached_pairs(state, job.plan_parts):
        raise ConflictError(f"job {job.id} cannot start: {describe_unreached(state, job.plan_parts)}")
    if missing := missing_versions(state, job):
        raise ConflictError(f"job {job.id} cannot start: {', '.join(missing)} must bring its model and data first")
    if needs_preflight(state, job) and not has_passed_once(job):
        raise ConflictError(
            f"the sites of plan {job.plan.id} have not passed the checks of job {job.id} yet, so it cannot take chips",
            hint=f"try again in a few seconds; isthmus show {job.id} lists the checks",
        )
    if refusal := limit_refusal(state, job):
        raise ConflictError(
            f"job {job.id} cannot start: {refusal.text}", hint="isthmus quota show lists limits and use"
        )
    if not victims_suffice(state, job, victims):
        raise ConflictError(
            f"the chips of these jobs no longer suffice for job {job.id}: "
            f"{', '.join(sorted({one.job for one in victims})) or 'none given'}",
            hint=f"isthmus show {job.id} lists the victims it needs now",
        )
    return True


def admit_cancellation(state: PoolState, event: JobCancelled) -> bool:
    """Return whether the job is not yet being cancelled; raise `ConflictError` if it has ended otherwise."""
    job = require_job(state, event.job_id)
    if job.state == "cancelled" or (job.state == "stopping" and job.state_after_stop == "cancelled"):
        return False
    if job.state in TERMINAL_STATES or (job.state == "stopping" and job.state_after_stop == "succeeded"):
        ended = job.state if job.state in TERMINAL_STATES else job.state_after_stop
        raise ConflictError(f"job {job.id} has already {ended}")
    return True


def admit_deletion(state: PoolState, event: JobDeleted) -> bool:
    """Return True; raise `ConflictError` if the job has not ended or a site may still hold parts of it."""
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


def admit_report(state: PoolState, event: AgentReported) -> bool:
    """Return whether the report differs from the last one; raise `AuthError` for an agent that is not enrolled."""
    record = state.clusters.get(event.cluster.name)
    if not admit_agent(record, event):
        return False
    if record is None or not record.connected or is_awaited(state, event.cluster.name):
        return True
    return report_differs(record, event)


def admit_site_check(state: PoolState, event: SiteChecked) -> bool:
    """Return whether the job waits for this answer of the site."""
    job = state.jobs.get(event.answer.job)
    return (
        job is not None
        and is_checking(job)
        and job.preflight is not None
        and job.preflight.expects(event.cluster, event.answer)
    )


def admit_preflight_timeout(state: PoolState, event: PreflightTimedOut) -> bool:
    """Return whether the job still waits for answers of this preflight."""
    job = state.jobs.get(event.job_id)
    return job is not None and is_checking(job) and job.preflight is not None and job.preflight.round == event.round


def admit_peer_check_timeout(state: PoolState, event: PeerCheckTimedOut) -> bool:
    """Return whether a job still waits for the result of this check."""
    record = state.clusters.get(event.source)
    return record is not None and event.target in record.check_waits and record.to_check[event.target] == event.number


def admit_agent_loss(state: PoolState, event: AgentLost) -> bool:
    """Return whether the cluster is connected."""
    record = state.clusters.get(event.cluster)
    return record is not None and record.connected


def admit_deadline(state: PoolState, event: DeadlinePassed) -> bool:
    """Return whether the job still waits for the deadline."""
    job = state.jobs.get(event.job_id)
    if job is None or job.state_deadline_s is None:
        return False
    return job.state == event.state and job.attempt == event.attempt


def admit_epoch(state: PoolState, event: EpochBegan) -> bool:
    """Return whether the epoch is later than the current one."""
    return event.epoch > state.epoch


def admit_compaction(_state: PoolState, _event: LogCompacted) -> bool:
    """Return True: the log records its base, which the store checks."""
    return True


def admit_pool(state: PoolState, event: PoolSet) -> bool:
    """Return whether the links or the rules of the queue differ."""
    now = state.objective, state.patience_s, state.planner_turns, state.needs_free_chips
    given = event.objective, event.patience_s, event.planner_turns, event.needs_free_chips
    links, had = tuple(state.links.values()), state.shares
    shares = event.half_life_s, dict(event.share_weights), event.share_by_tree
    return (*now, links, had.half_life_s, had.weights, had.by_tree) != (*given, event.links, *shares)


def admit_restart(_state: PoolState, _event: Restarted) -> bool:
    """Return False: a restart changes no state that is logged."""
    return False
