"""Preflight of waiting jobs: no chips are held before every site of the plan has passed the checks of the job.

A failed check excludes its site: the job takes another candidate plan (its user chooses again under the policy
`manual`), is planned without the site, or fails if there is no such plan. A job that has already trained waits and is
checked again. So does one whose site does not answer, a limited number of times.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.control.coordinator.attempts import refuse_in_queue
from isthmus.control.coordinator.job_lifecycle import leave_site_queues, move_job
from isthmus.control.coordinator.plan_requests import request_plans, withdraw_plan_request
from isthmus.control.preflight.conflicts import describe_conflicts, excluded_clusters, is_excluded, valid_conflicts
from isthmus.control.preflight.preflight_record import PreflightRecord
from isthmus.control.queries.preflight_status import executes_checks, has_passed_once, needs_preflight
from isthmus.control.state import allocations
from isthmus.control.state.events import PreflightTimedOut, SiteChecked
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.update_indexes import index_preflight, reindex_job
from isthmus.core.errors import IllegalTransitionError
from isthmus.core.plan import Plan


def may_hold_chips(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Return whether every site of the job's plan has passed its checks; otherwise ask them."""
    if not needs_preflight(state, job) or _has_passed(state, job, now_s):
        return True
    begin_preflight(state, job, now_s)
    return _has_passed(state, job, now_s)


def begin_preflight(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Ask the sites of the job's plan for its checks, unless they are asked already."""
    plan, known = _plan_of(job), job.preflight
    if known is not None and known.state == "pending":
        return
    sites = {name for name in plan.clusters if executes_checks(state, name)}
    job.num_preflights += 1
    job.preflight = PreflightRecord.begin(
        job.id,
        job.spec,
        plan,
        now_s,
        user=job.user,
        number=job.num_preflights,
        sites=sites,
        fetching={name for name in sites if _fetches_files(state, job, name)},
    )
    index_preflight(state, job)
    state.changed_jobs.add(job.id)


def add_site_check(state: PoolState, event: SiteChecked) -> None:
    """Add a site's answer; once all sites have answered, the job may start or loses its plan."""
    job = state.jobs[event.answer.job]
    if job.preflight is not None:
        job.preflight.add_answer(event.cluster, event.answer, job.spec, event.now_s)
        _conclude(state, job, event.now_s)


def end_unanswered_preflight(state: PoolState, event: PreflightTimedOut) -> None:
    """End a preflight to which a site has not answered in time; it is repeated after a back-off."""
    job = state.jobs[event.job_id]
    if job.preflight is not None:
        job.preflight.end_unanswered(event.now_s)
        _conclude(state, job, event.now_s)


def _conclude(state: PoolState, job: JobRecord, now_s: float) -> None:
    """Act on the end of a preflight."""
    record = job.preflight
    state.changed_jobs.add(job.id)
    if record is None or record.state == "pending":
        return
    index_preflight(state, job)
    state.indexes.capacity_freed = True  # the chips reserved for it are used now, or freed
    if record.state == "passed":
        job.conflicts = {one: found for one, found in job.conflicts.items() if not one <= set(record.sites)}
        return
    conflicts, unknowns = record.conflicts(), record.unknowns()
    if not conflicts and job.refusals + 1 >= state.config.max_unknown_preflights and not job.has_run:
        why = f"{'; '.join(unknowns)}; asked {job.refusals + 1} times"
        conflicts = {frozenset({name}): why for name in record.unknown_sites}
    if not conflicts:
        refuse_in_queue(state, job, "; ".join([*conflicts.values(), *unknowns]), now_s)
        return
    exclude_sites(state, job, conflicts, now_s)


def exclude_sites(state: PoolState, job: JobRecord, conflicts: Mapping[frozenset[str], str], now_s: float) -> None:
    """Give a job another plan without the sites in conflict; one that has trained waits for them instead."""
    job.conflicts = valid_conflicts(job.conflicts, now_s, state.config.conflict_valid_s)
    job.conflicts |= {clusters: (why, now_s) for clusters, why in conflicts.items()}
    others = () if job.has_run and job.plan_fixed else _other_plans(job)
    if job.has_run and not others:
        refuse_in_queue(state, job, describe_conflicts(job.conflicts), now_s)
    else:
        leave_plan(state, job, others, now_s)


def avoid_silent_pair(state: PoolState, job: JobRecord, pair: frozenset[str], why: str, now_s: float) -> None:
    """Give a job another candidate plan without both sites, unless it has trained or its user chose the plan."""
    if job.plan_fixed:
        return
    found = {**valid_conflicts(job.conflicts, now_s, state.config.conflict_valid_s), pair: (why, now_s)}
    others = tuple(plan for plan in _candidates(job) if not is_excluded(found, plan.clusters))
    if others:
        job.conflicts = found
        leave_plan(state, job, others, now_s)


def _candidates(job: JobRecord) -> tuple[Plan, ...]:
    return job.plans.plans if job.plans else ()


def _other_plans(job: JobRecord) -> tuple[Plan, ...]:
    """Return the job's candidate plans without conflict."""
    return tuple(plan for plan in _candidates(job) if not is_excluded(job.conflicts, plan.clusters))


def leave_plan(state: PoolState, job: JobRecord, others: tuple[Plan, ...], now_s: float) -> None:
    """Replace the job's plan by one of `others`, plan the job without the sites in conflict, or fail it."""
    dropped, why = _plan_of(job), describe_conflicts(job.conflicts)
    withdraw_plan_request(state, job)
    leave_site_queues(state, job)
    if job.state == "blocked":
        move_job(state, job, "waiting", now_s)
    job.plan_fixed, job.refusals = False, 0
    job.last_restart_reason = f"plan {dropped.id} failed its checks: {why}"
    whole = allocations.total_chips(state)
    if others and not job.auto_plan:
        move_job(state, job, "choosing", now_s, f"{job.last_restart_reason}; choose another plan")
    elif others:
        reserved = state.indexes.reserved
        fitting = next((plan for plan in others if allocations.plan_fits(state, job, plan, reserved)), others[0])
        allocations.assign_plan(state, job, fitting)
        job.reason = job.last_restart_reason
        reindex_job(state, job)
    elif whole.keys() <= excluded_clusters(job.conflicts, {name: sum(one.values()) for name, one in whole.items()}):
        allocations.assign_plan(state, job, None)
        move_job(state, job, "failed", now_s, f"{job.last_restart_reason}; the pool has no other site")
    else:
        allocations.assign_plan(state, job, None)
        job.last_planned_free = job.last_planned_total = None
        job.reason = f"{job.last_restart_reason}; planning without the site"
        request_plans(state, job)
        reindex_job(state, job)


def _has_passed(state: PoolState, job: JobRecord, now_s: float) -> bool:
    """Return whether the checks of the job's plan have passed and are still valid."""
    record = job.preflight
    return record is not None and has_passed_once(job) and now_s - record.answered_s <= state.config.preflight_valid_s


def _fetches_files(state: PoolState, job: JobRecord, cluster: str) -> bool:
    """Return whether a site with its own storage copies the job's files from the sites where it has trained."""
    own_storage = state.clusters[cluster].free_storage_bytes is not None
    return own_storage and bool(job.file_clusters) and cluster not in job.file_clusters


def _plan_of(job: JobRecord) -> Plan:
    if job.plan is None:
        raise IllegalTransitionError(f"job {job.id}: a preflight without a plan", hint="this is a bug: report it")
    return job.plan
