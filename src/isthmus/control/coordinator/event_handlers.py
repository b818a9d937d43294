"""The effect of each event on the state, one function per kind of event (`EVENT_RULES`)."""

from __future__ import annotations

from isthmus.control.coordinator.accounting.metered_holdings import owner_of_part
from isthmus.control.coordinator.accounts.set_accounts import share_projects
from isthmus.control.coordinator.advance_job import advance_job, notify_preemptor
from isthmus.control.coordinator.agent_reports import apply_report
from isthmus.control.coordinator.attempts import abort_preemption, fail_attempt, refuse_attempt, stop_attempt
from isthmus.control.coordinator.catalogue.site_copies import follow_copies
from isthmus.control.coordinator.job_lifecycle import leave_site_queues, move_job
from isthmus.control.coordinator.joint_preemption import begin_preemption, timeout_reason
from isthmus.control.coordinator.plan_requests import apply_plans, request_plans, withdraw_plan_request
from isthmus.control.coordinator.sites.elastic_parts import end_late_joins
from isthmus.control.queries.accounts.job_project import job_project
from isthmus.control.state import allocations
from isthmus.control.state.events import (
    AgentLost,
    AgentReported,
    DeadlinePassed,
    EpochBegan,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    LogCompacted,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    PoolSet,
    PreemptionAgreed,
    Restarted,
)
from isthmus.control.state.job_records import WAITING_STATES, ClusterVictim, JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord
from isthmus.control.state.update_indexes import index_job, reindex_job, set_state_deadline, uncap, unindex_job, unpark
from isthmus.core.pool_resource import PoolResource


def add_job(state: PoolState, event: JobSubmitted) -> None:
    """Add a job to the queue and request its plans."""
    state.num_submitted += 1
    project = job_project(state.accounts.tree, event.user, event.submission.job.project)
    job = JobRecord.create(event.job_id, state.num_submitted, event.user, event.submission, event.now_s, project)
    state.jobs[job.id] = state.live_jobs[job.id] = job
    live = state.indexes.live_by_user
    live[job.user] = live.get(job.user, 0) + 1
    stored = state.indexes.stored_by_user
    stored[job.user] = stored.get(job.user, 0) + job.packed.num_bytes
    if event.submission.key:
        state.ids_by_key[event.user, event.submission.key] = job.id
    uses = "; ".join(f"{one.kind} {one.owner}/{one.name}@{one.version}" for one in job.versions)
    job.history.add("submitted", event.now_s, 0, uses and f"uses {uses}")
    index_job(state, job)
    request_plans(state, job)
    state.changed_jobs.add(job.id)


def accept_plans(state: PoolState, event: PlansMade) -> None:
    """Apply the planner's answer."""
    apply_plans(state, state.jobs[event.job_id], event.plans, event.now_s)


def fail_planning(state: PoolState, event: PlanningFailed) -> None:
    """Fail a job that has no plan because the planner failed."""
    job = state.jobs[event.job_id]
    withdraw_plan_request(state, job)
    if job.plan is None:
        move_job(state, job, "failed", event.now_s, event.reason)


def assign_chosen_plan(state: PoolState, event: PlanChosen) -> None:
    """Assign the plan that the user chose, and queue the job."""
    job = state.jobs[event.job_id]
    plans = job.plans.plans if job.plans else ()
    withdraw_plan_request(state, job)
    leave_site_queues(state, job)
    set_state_deadline(state, job, None)
    allocations.assign_plan(state, job, next(plan for plan in plans if plan.id == event.plan_id))
    job.plan_fixed, job.refusals = True, 0
    uncap(state, job)
    unpark(state, job)
    job.history.add("planned", event.now_s, job.attempt, f"{event.plan_id} chosen by the user")
    if job.state != "waiting":
        move_job(state, job, "waiting", event.now_s, f"plan {event.plan_id} chosen", told="")


def begin_agreed_preemption(state: PoolState, event: PreemptionAgreed) -> None:
    """Begin the joint preemption of the victims that the user agreed to."""
    job = state.jobs[event.job_id]
    withdraw_plan_request(state, job)
    victims = [ClusterVictim(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in event.victims]
    begin_preemption(state, job, victims, event.now_s)


def cancel_job(state: PoolState, event: JobCancelled) -> None:
    """Cancel a waiting job, or stop the attempt of another."""
    job = state.jobs[event.job_id]
    withdraw_plan_request(state, job)
    reason = f"cancelled by {event.by or 'the user'}"
    if job.state in WAITING_STATES or job.state in ("planning", "choosing"):
        move_job(state, job, "cancelled", event.now_s, reason)
    else:
        stop_attempt(state, job, "cancelled", reason, event.now_s)
    notify_preemptor(state, job, event.now_s)


def delete_job(state: PoolState, event: JobDeleted) -> None:
    """Remove an ended job."""
    job = state.jobs.pop(event.job_id)
    unindex_job(state, job)
    stored = state.indexes.stored_by_user
    stored[job.user] -= job.packed.num_bytes
    if not stored[job.user]:
        del stored[job.user]
    state.ids_by_key.pop((job.user, job.packed.key), None)


def accept_report(state: PoolState, event: AgentReported) -> None:
    """Apply a site's report and advance the jobs that it concerns."""
    record = state.clusters.get(event.cluster.name)
    before = record.copies if record is not None else None
    for job in apply_report(state, event):
        advance_job(state, job, event.now_s)
        notify_preemptor(state, job, event.now_s)
    _revoke_excess(state, state.clusters[event.cluster.name], event.now_s)
    follow_copies(state, event.cluster.name, before or {}, event.now_s)


def _revoke_excess(state: PoolState, record: ClusterRecord, now_s: float) -> None:
    """Revoke parts, latest job first, while the inventory is smaller than the allocations."""
    for group in sorted(record.allocated_chips):
        chips = record.capacity(group)
        if record.allocated_chips[group] <= chips:
            continue
        for part in sorted(record.parts.values(), key=lambda p: -state.jobs[p.job].number):
            if record.active_chips(group) <= chips:
                break
            if part.allocated and part.desired != "released" and group in part.chips:
                reason = f"{record.cluster.name} now has {chips} {group} in total, fewer than allocated"
                _revoke(state, state.jobs[part.job], reason, now_s, owner_of_part(state, part))


def _revoke(state: PoolState, job: JobRecord, reason: str, now_s: float, owner: str) -> None:
    """End the current attempt for lack of chips of `owner`: requeue before the commit, restart after it."""
    if job.state == "preempting":
        abort_preemption(state, job, reason, now_s)
    else:
        (refuse_attempt if job.state == "preparing" else fail_attempt)(state, job, reason, now_s, lost_by=owner)
    notify_preemptor(state, job, now_s)


def disconnect_cluster(state: PoolState, event: AgentLost) -> None:
    """Mark the cluster as disconnected and advance the jobs that have parts there."""
    record = state.clusters[event.cluster]
    record.connected = False
    state.indexes.inventory_version += 1
    for job in [state.jobs[name] for name in dict.fromkeys(part.job for part in record.parts.values())]:
        state.changed_jobs.add(job.id)
        advance_job(state, job, event.now_s)
        notify_preemptor(state, job, event.now_s)
    state.indexes.capacity_freed = True


def end_overdue_state(state: PoolState, event: DeadlinePassed) -> None:
    """End the state whose deadline passed: back-off, preemption, preparation, start, or the wait of a part to join."""
    job, now_s = state.jobs[event.job_id], event.now_s
    if job.state == "waiting":
        set_state_deadline(state, job, None)
        reindex_job(state, job)
        if job.plan is None:
            request_plans(state, job)
    elif job.state == "preempting":
        abort_preemption(state, job, timeout_reason(state, job), now_s)
    elif job.state == "preparing":
        slow = [part for part in job.current_parts() if part.state != "prepared"]
        names = ", ".join(part.cluster for part in slow)
        limit_s = state.config.eviction_timeout_s if job.victims else state.config.reservation_timeout_s
        lost_by = owner_of_part(state, slow[0]) if slow and not job.victims else ""
        refuse_attempt(state, job, f"{names} did not prepare within {limit_s:g} s", now_s, lost_by=lost_by)
    elif job.state == "running":
        set_state_deadline(state, job, None)
        end_late_joins(state, job, now_s)
    else:
        late = [
            f"{rank} at {part.cluster}"
            for part in job.current_parts()
            for rank in part.ranks
            if rank not in {worker.rank for worker in part.workers}
        ]
        fail_attempt(
            state,
            job,
            f"ranks {', '.join(late)} did not check in within {state.config.start_timeout_s:g} s",
            now_s,
        )


def begin_epoch(state: PoolState, event: EpochBegan) -> None:
    """Record that another server is the leader."""
    state.epoch = event.epoch


def keep_state(_state: PoolState, _event: LogCompacted) -> None:
    """Change nothing: the state stays what the events up to now have made it."""


def set_pool(state: PoolState, event: PoolSet) -> None:
    """Set the operator's links and the rules of the queue."""
    state.links = {PoolResource.link(link.source, link.target): link for link in event.links}
    state.objective, state.patience_s = event.objective, event.patience_s
    state.planner_turns, state.needs_free_chips = event.planner_turns, event.needs_free_chips
    state.shares.configure(event.half_life_s, dict(event.share_weights), event.now_s, by_tree=event.share_by_tree)
    share_projects(state)
    state.indexes.capacity_freed = state.indexes.capacity_added = True
    state.indexes.inventory_version += 1


def reset_agent_timeouts(state: PoolState, event: Restarted) -> None:
    """Restart the timeout of every agent after a restart of the server."""
    for record in state.clusters.values():
        record.last_report_s = event.now_s
        record.last_contact_s = event.now_s if event.steady_s is None else event.steady_s
