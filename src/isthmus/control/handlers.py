"""What each event does to the state: one function per kind, `HANDLERS` the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus.control.advance import advance, fail, refuse, stop, take_plans
from isthmus.control.events import (
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
)
from isthmus.control.lifecycle import move, observe
from isthmus.control.records import ClusterRecord, JobRecord, PartRecord, State
from isthmus.core.messages import ObservedPart


def _submitted(state: State, event: JobSubmitted) -> None:
    job = JobRecord(
        id=event.job_id,
        user=event.user,
        submission=event.submission,
        submitted_s=event.now_s,
        changed_s=event.now_s,
    )
    job.story.append(f"{event.now_s:.3f} submitted by {event.user}")
    state.jobs[job.id] = state.live[job.id] = job
    if event.submission.key:
        state.keys[event.user, event.submission.key] = job.id
    state.touched.add(job.id)


def _plans_made(state: State, event: PlansMade) -> None:
    take_plans(state, state.jobs[event.job_id], event.plans, event.now_s)


def _planning_failed(state: State, event: PlanningFailed) -> None:
    move(state, state.jobs[event.job_id], "failed", event.now_s, event.reason)


def _chosen(state: State, event: PlanChosen) -> None:
    job = state.jobs[event.job_id]
    plans = job.plans.plans if job.plans else ()
    job.plan = next(plan for plan in plans if plan.id == event.plan_id)
    job.pinned, job.refusals, job.deadline_s = True, 0, None
    if job.state == "choosing":
        move(state, job, "waiting", event.now_s, f"plan {job.plan.id} chosen")


def _cancelled(state: State, event: JobCancelled) -> None:
    job = state.jobs[event.job_id]
    if job.state in ("planning", "choosing", "waiting"):
        move(state, job, "cancelled", event.now_s, "cancelled by the user")
    else:
        stop(state, job, "cancelled", "cancelled by the user", event.now_s)


def _deleted(state: State, event: JobDeleted) -> None:
    job = state.jobs.pop(event.job_id)
    state.keys.pop((job.user, job.submission.key), None)


def _reported(state: State, event: AgentReported) -> None:
    seen = {(part.job, part.attempt): part for part in event.parts}
    record, reborn = _record(state, event, seen)
    affected = [state.jobs[part.job] for part in record.promised.values()]
    for key, part in list(record.promised.items()):
        if key in seen:
            observe(state, part, seen[key])
        elif reborn and part.state in ("prepared", "running"):
            observe(state, part, _missing(part))
    for job in affected:
        advance(state, job, event.now_s)
    _fit_inventory(state, record, event.now_s)


def _record(
    state: State, event: AgentReported, seen: dict[tuple[str, int], ObservedPart]
) -> tuple[ClusterRecord, bool]:
    """Bring the cluster's record up to date; tell whether the agent has just been started anew.

    Only an incarnation never seen before counts as new: a late report of an older one is not a new start.
    """
    name = event.cluster.name
    record = state.clusters.get(name)
    reborn = record is not None and event.incarnation not in record.incarnations
    if record is None:
        record = state.clusters[name] = ClusterRecord(
            cluster=event.cluster, incarnation=event.incarnation, free_chips={}, reported={}
        )
    record.cluster, record.incarnation = event.cluster, event.incarnation
    record.free_chips, record.reported, record.connected = event.free_chips, seen, True
    record.incarnations.add(event.incarnation)
    record.heard_s = event.now_s
    return record, reborn


def _missing(part: PartRecord) -> ObservedPart:
    """Return what it means that an agent, started anew, does not know a part it had: the part failed."""
    return ObservedPart(
        job=part.job, attempt=part.attempt, state="failed", detail="the agent came back without it"
    )


def _fit_inventory(state: State, record: ClusterRecord, now_s: float) -> None:
    """Take parts back, the latest job's first, while a shrunken inventory cannot hold what was promised."""
    for group in _promised_groups(record):
        chips = {each.name: each.chips for each in record.cluster.node_groups}.get(group, 0)
        for part in sorted(record.promised.values(), key=lambda p: -state.jobs[p.job].submitted_s):
            if record.wanted(group) <= chips:
                break
            if part.desired != "released" and group in part.chips:
                reason = f"{record.cluster.name} now has {chips} {group} in all, fewer than were promised"
                _take_back(state, state.jobs[part.job], reason, now_s)


def _promised_groups(record: ClusterRecord) -> list[str]:
    return sorted({group for part in record.promised.values() for group in part.chips})


def _take_back(state: State, job: JobRecord, reason: str, now_s: float) -> None:
    """End the present attempt for want of chips: before the commit it waits, after it, it starts again."""
    (refuse if job.state == "preparing" else fail)(state, job, reason, now_s)


def _lost(state: State, event: AgentLost) -> None:
    record = state.clusters[event.cluster]
    record.connected = False
    for job in [state.jobs[part.job] for part in record.promised.values()]:
        state.touched.add(job.id)
        advance(state, job, event.now_s)


def _deadline(state: State, event: DeadlinePassed) -> None:
    job = state.jobs[event.job_id]
    if job.state == "waiting":
        job.deadline_s, job.tried_on = None, None
        return
    if job.state == "preparing":
        slow = [part.cluster for part in job.present() if part.state != "prepared"]
        refuse(
            state, job, f"{', '.join(slow)} did not answer in {state.rules.reservation_s:g} s", event.now_s
        )
        return
    late = [
        f"{rank} at {part.cluster}"
        for part in job.present()
        for rank in part.ranks
        if rank not in {worker.rank for worker in part.workers}
    ]
    fail(state, job, f"ranks {', '.join(late)} did not check in in {state.rules.start_s:g} s", event.now_s)


def _epoch(state: State, event: EpochBegan) -> None:
    state.epoch = event.epoch


HANDLERS: Mapping[type[Any], Callable[[State, Any], None]] = {
    JobSubmitted: _submitted,
    PlansMade: _plans_made,
    PlanningFailed: _planning_failed,
    PlanChosen: _chosen,
    JobCancelled: _cancelled,
    JobDeleted: _deleted,
    AgentReported: _reported,
    AgentLost: _lost,
    DeadlinePassed: _deadline,
    EpochBegan: _epoch,
}
