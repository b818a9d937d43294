"""`apply_report`: apply an agent's report to the records of its site and parts.

Only changed parts are processed; the cost depends on the parts of the site, not on the size of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.control.coordinator.part_observations import apply_observation, record_part_events
from isthmus.control.coordinator.sites.peer_check_results import record_peer_checks
from isthmus.control.queries.enrolled_agent import is_new_session
from isthmus.control.state import allocations
from isthmus.control.state.events import AgentReported
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.reconcile_log import note_report
from isthmus.control.state.site_records import ClusterRecord, EnrolledAgent, PartRecord
from isthmus.core.catalogue import HeldCopy
from isthmus.core.messages.agent_messages import ObservedLocalJob, ObservedPart

MAX_INCARNATIONS = 1_000
"""Starts of an enrolled agent that are remembered; before it was enrolled all are."""
_STORAGE_CHANGE_SHARE = 0.01
"""Share of the total storage by which free storage must change to count as a change."""


def apply_report(state: PoolState, event: AgentReported) -> list[JobRecord]:
    """Update a site's record; return the jobs whose parts have changed, oldest allocation first."""
    record, reborn, back = _cluster_record(state, event)
    before, before_bytes = (record.free_by_group(), record.free_bytes()) if not back else ({}, 0)
    had = {group.name: group.num_chips for group in record.cluster.node_groups} if not back else {}
    seen = {(part.job, part.attempt): part for part in event.parts}
    known, record.reported_parts = record.reported_parts, seen
    storage_bytes = record.cluster.storage_bytes
    record.cluster, record.free_chips, record.cached_free = event.cluster, event.free_chips, None
    record.reported_queue, record.free_storage_bytes = event.queue, event.free_storage_bytes
    local, record.local_jobs = record.local_jobs, {one.name: one for one in event.local_jobs}
    record.checks, record.run_lease_s = event.checks, event.run_lease_s
    record.copies, record.fetch_gbps = _copies_by_key(event.copies), event.fetch_gbps
    record.moves = event.moves
    (state.proposing.add if event.moves else state.proposing.discard)(record.cluster.name)
    _bind_agent(record, event)
    if event.agent is not None and len(record.incarnations) >= MAX_INCARNATIONS:  # its sessions tell late reports
        record.incarnations = {record.incarnation}
    record.incarnation, record.connected, record.last_report_s = event.incarnation, True, event.now_s
    record.incarnations.add(event.incarnation)
    record_peer_checks(state, record, event, restarted=reborn, back=back)
    note_report(state, record, event)
    touched = {key for key, part in seen.items() if known.get(key) != part} | (known.keys() - seen.keys())
    if back or reborn:
        touched |= record.parts.keys()
    affected = _observe_parts(state, record, touched, reborn, event.now_s)
    if local.keys() != record.local_jobs.keys() or any(
        local[n].running != one.running for n, one in record.local_jobs.items()
    ):
        affected |= {name: state.jobs[name] for name in state.indexes.preempting}
    indexes, has = state.indexes, {group.name: group.num_chips for group in record.cluster.node_groups}
    indexes.inventory_version += back or had != has or record.cluster.storage_bytes != storage_bytes
    indexes.capacity_added = indexes.capacity_added or back or _has_more(had, has)
    indexes.capacity_freed = (
        indexes.capacity_freed or _has_more(before, record.free_by_group()) or record.free_bytes() > before_bytes
    )
    return list(affected.values())


def report_differs(record: ClusterRecord, event: AgentReported) -> bool:
    """Return whether a report differs from the last one in more than unsaved work."""
    if (
        record.incarnation != event.incarnation
        or record.free_chips != event.free_chips
        or record.cluster != event.cluster
        or record.reported_queue != event.queue
        or record.peer_address != event.peer_address
        or any(record.to_check.get(check.cluster) == check.number for check in event.peer_checks)
        or record.checks != event.checks
        or record.copies != _copies_by_key(event.copies)
        or record.fetch_gbps != event.fetch_gbps
        or record.run_lease_s != event.run_lease_s
        or record.moves != event.moves
        or is_new_session(record, event)
        or len(record.reported_parts) != len(event.parts)
        or len(record.local_jobs) != len(event.local_jobs)
    ):
        return True
    if any(_part_differs(record.reported_parts.get((part.job, part.attempt)), part) for part in event.parts):
        return True
    if any(_local_differs(record.local_jobs.get(one.name), one) for one in event.local_jobs):
        return True
    before, now = record.free_storage_bytes, event.free_storage_bytes
    if before is None or now is None:
        return before is not now
    return abs(before - now) > _STORAGE_CHANGE_SHARE * record.cluster.storage_bytes


def _copies_by_key(copies: tuple[HeldCopy, ...] | None) -> dict[tuple[str, str], HeldCopy] | None:
    return None if copies is None else {(one.owner, one.version): one for one in copies}


def record_unsaved_work(
    record: ClusterRecord, parts: tuple[ObservedPart, ...], local: tuple[ObservedLocalJob, ...]
) -> None:
    """Record the unsaved work of parts and local jobs, which is shown to users and orders victims."""
    for seen in parts:
        part = record.parts.get((seen.job, seen.attempt))
        if part is not None:
            part.unsaved_s = seen.unsaved_s
    for one in local:
        known = record.local_jobs.get(one.name)
        if known is not None and known.unsaved_s != one.unsaved_s:
            record.local_jobs[one.name] = known.model_copy(update={"unsaved_s": one.unsaved_s})


def _cluster_record(state: PoolState, event: AgentReported) -> tuple[ClusterRecord, bool, bool]:
    """Return the site's record, whether its agent has restarted, and whether the site is new or reconnected.

    Only an incarnation never seen before counts as a restart, not a late report of an older one.
    """
    record = state.clusters.get(event.cluster.name)
    if record is None:
        record = ClusterRecord(cluster=event.cluster, incarnation=event.incarnation, free_chips=event.free_chips)
        state.clusters[event.cluster.name] = record
        return record, False, True
    return record, event.incarnation not in record.incarnations, not record.connected


def _bind_agent(record: ClusterRecord, event: AgentReported) -> None:
    """Record the agent of an admitted report: enrol it, or note its new session."""
    said, known = event.agent, record.agent
    if said is None:
        return
    if known is None or known.id != said.id:
        known = record.agent = EnrolledAgent(
            id=said.id, machine=said.machine, boot=said.boot, enrolled_s=event.now_s, session=0
        )
    if said.session > known.session:
        known.session, known.session_s = said.session, event.now_s
    known.boot, known.saves = said.boot, max(known.saves, said.saves)
    if event.peer_address is not None:
        known.host = event.peer_address.host
    record.enrolling = False


def _observe_parts(
    state: PoolState, record: ClusterRecord, keys: set[tuple[str, int]], agent_restarted: bool, now_s: float
) -> dict[str, JobRecord]:
    """Apply the changed observations; return the jobs of these parts and the jobs that preempt them."""
    found: dict[str, JobRecord] = {}
    for key in [key for key in record.parts if key in keys]:
        part, seen = record.parts[key], record.reported_parts.get(key)
        allocations.update_held(record, part, seen)
        if seen is None and agent_restarted and part.state in ("queued", "ready", "prepared", "running"):
            seen = _lost_part(part)
        if seen is not None:
            record_part_events(state, part, seen, now_s)
            apply_observation(state, part, seen)
        job = state.jobs[part.job]
        found[job.id] = job
        if job.preemptor is not None and job.preemptor in state.jobs:
            found[job.preemptor] = state.jobs[job.preemptor]
    return found


def _lost_part(part: PartRecord) -> ObservedPart:
    """Return the observation for a part that a restarted agent no longer has: it failed."""
    return ObservedPart(
        job=part.job, attempt=part.attempt, state="failed", detail="the agent restarted without the part"
    )


def _has_more(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    return any(amount > before.get(name, 0) for name, amount in now.items())


def _part_differs(before: ObservedPart | None, now: ObservedPart) -> bool:
    if before is None:
        return True
    return before != now and before.model_copy(update={"unsaved_s": now.unsaved_s}) != now


def _local_differs(before: ObservedLocalJob | None, now: ObservedLocalJob) -> bool:
    if before is None:
        return True
    return before != now and before.model_copy(update={"unsaved_s": now.unsaved_s}) != now
