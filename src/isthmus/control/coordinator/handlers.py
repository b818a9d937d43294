"""The effect of each event on the state: one function per kind, in the table `HANDLERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.control.coordinator.advance import advance
from isthmus.control.coordinator.agent_reports import take_report
from isthmus.control.coordinator.attempts import fail, refuse, stop
from isthmus.control.coordinator.job_lifecycle import dequeue, move
from isthmus.control.coordinator.joint_preemption import begin_preemption, give_up, waits_for
from isthmus.control.coordinator.plan_requests import take_plans, want_plans, withdraw
from isthmus.control.state import ledger
from isthmus.control.state.events import (
    AgentLost,
    AgentReported,
    DeadlinePassed,
    EpochBegan,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    PlanChosen,
    PlanningFailed,
    PlansMade,
    PoolSet,
    PreemptionAgreed,
)
from isthmus.control.state.job_records import WAITING, JobRecord, State, VictimAt
from isthmus.control.state.queue_index import add_job, drop_job, file_job, set_deadline, unpark
from isthmus.control.state.site_records import ClusterRecord


def _submitted(state: State, event: JobSubmitted) -> None:
    state.submitted += 1
    job = JobRecord.of(event.job_id, state.submitted, event.user, event.submission, event.now_s)
    state.jobs[job.id] = state.live[job.id] = job
    if event.submission.key:
        state.keys[event.user, event.submission.key] = job.id
    add_job(state, job)
    want_plans(state, job)
    state.touched.add(job.id)


def _plans_made(state: State, event: PlansMade) -> None:
    take_plans(state, state.jobs[event.job_id], event.plans, event.now_s)


def _planning_failed(state: State, event: PlanningFailed) -> None:
    job = state.jobs[event.job_id]
    withdraw(state, job)
    if job.plan is None:
        move(state, job, "failed", event.now_s, event.reason)


def _chosen(state: State, event: PlanChosen) -> None:
    job = state.jobs[event.job_id]
    plans = job.plans.plans if job.plans else ()
    withdraw(state, job)
    dequeue(state, job)
    set_deadline(state, job, None)
    ledger.give_plan(state, job, next(plan for plan in plans if plan.id == event.plan_id))
    job.pinned, job.refusals = True, 0
    unpark(state, job)
    if job.state != "waiting":
        move(state, job, "waiting", event.now_s, f"plan {event.plan_id} chosen")


def _agreed(state: State, event: PreemptionAgreed) -> None:
    job = state.jobs[event.job_id]
    withdraw(state, job)
    victims = [VictimAt(cluster=one.cluster, job=one.job, attempt=one.attempt) for one in event.victims]
    begin_preemption(state, job, victims, event.now_s)


def _cancelled(state: State, event: JobCancelled) -> None:
    job = state.jobs[event.job_id]
    withdraw(state, job)
    if job.state in WAITING or job.state in ("planning", "choosing"):
        move(state, job, "cancelled", event.now_s, "cancelled by the user")
    else:
        stop(state, job, "cancelled", "cancelled by the user", event.now_s)
    _tell_requester(state, job, event.now_s)


def _deleted(state: State, event: JobDeleted) -> None:
    job = state.jobs.pop(event.job_id)
    drop_job(state, job)
    state.keys.pop((job.user, job.packed.key), None)


def _reported(state: State, event: AgentReported) -> None:
    for job in take_report(state, event):
        advance(state, job, event.now_s)
        _tell_requester(state, job, event.now_s)
    _fit_inventory(state, state.clusters[event.cluster.name], event.now_s)


def _tell_requester(state: State, job: JobRecord, now_s: float) -> None:
    """Advance the job that preempts this one."""
    requester = state.jobs.get(job.victim_of or "")
    if requester is not None and requester.state == "preempting":
        advance(state, requester, now_s)


def _fit_inventory(state: State, record: ClusterRecord, now_s: float) -> None:
    """Revoke parts, latest job first, while the inventory is smaller than the allocations."""
    for group in sorted(record.taken):
        chips = record.capacity(group)
        if record.taken[group] <= chips:
            continue
        for part in sorted(record.parts.values(), key=lambda p: -state.jobs[p.job].number):
            if record.wanted(group) <= chips:
                break
            if part.promised and part.desired != "released" and group in part.chips:
                reason = f"{record.cluster.name} now has {chips} {group} in total, fewer than allocated"
                _take_back(state, state.jobs[part.job], reason, now_s)


def _take_back(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """End the current attempt for lack of chips: requeue before the commit, restart after it."""
    if job.state == "preempting":
        give_up(state, job, reason, now_s)
    else:
        (refuse if job.state == "preparing" else fail)(state, job, reason, now_s)
    _tell_requester(state, job, now_s)


def _lost(state: State, event: AgentLost) -> None:
    record = state.clusters[event.cluster]
    record.connected = False
    state.indexes.inventory += 1
    for job in [state.jobs[name] for name in dict.fromkeys(part.job for part in record.parts.values())]:
        state.touched.add(job.id)
        advance(state, job, event.now_s)
        _tell_requester(state, job, event.now_s)
    state.indexes.grown = True


def _deadline(state: State, event: DeadlinePassed) -> None:
    job, now_s = state.jobs[event.job_id], event.now_s
    if job.state == "waiting":
        set_deadline(state, job, None)
        file_job(state, job)
        if job.plan is None:
            want_plans(state, job)
    elif job.state == "preempting":
        give_up(state, job, waits_for(state, job), now_s)
    elif job.state == "preparing":
        slow = ", ".join(part.cluster for part in job.present() if part.state != "prepared")
        limit_s = state.rules.evict_s if job.victims else state.rules.reservation_s
        refuse(state, job, f"{slow} did not prepare within {limit_s:g} s", now_s)
    else:
        late = [
            f"{rank} at {part.cluster}"
            for part in job.present()
            for rank in part.ranks
            if rank not in {worker.rank for worker in part.workers}
        ]
        fail(state, job, f"ranks {', '.join(late)} did not check in within {state.rules.start_s:g} s", now_s)


def _epoch(state: State, event: EpochBegan) -> None:
    state.epoch = event.epoch


def _pool_set(state: State, event: PoolSet) -> None:
    state.links = {f"{link.source}>{link.target}": link for link in event.links}
    state.objective, state.patience_s = event.objective, event.patience_s
    state.indexes.grown = state.indexes.widened = True
    state.indexes.inventory += 1


HANDLERS: Mapping[type[Any], Callable[[State, Any], None]] = {
    JobSubmitted: _submitted,
    PlansMade: _plans_made,
    PlanningFailed: _planning_failed,
    PlanChosen: _chosen,
    PreemptionAgreed: _agreed,
    JobCancelled: _cancelled,
    JobDeleted: _deleted,
    AgentReported: _reported,
    AgentLost: _lost,
    DeadlinePassed: _deadline,
    EpochBegan: _epoch,
    PoolSet: _pool_set,
}
