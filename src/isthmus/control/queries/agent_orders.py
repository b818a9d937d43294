"""Read-only queries on the state: orders for agents, site queues, events that are due."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.queries.accounts.budget_levels import budgets_due
from isthmus.control.queries.catalogue.catalogue_versions import needed_versions
from isthmus.control.queries.sites.part_links import part_links
from isthmus.control.queries.sites.plan_switches import plan_switches
from isthmus.control.queries.sites.probation_rules import PROBATION_S
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import (
    AgentLost,
    DeadlinePassed,
    DrainTimedOut,
    Event,
    PeerCheckTimedOut,
    PreflightTimedOut,
    ProbationEnded,
    RunLeaseEnded,
)
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord, PoolState
from isthmus.control.state.restored_log import PartKey
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.messages.agent_messages import PartOrder
from isthmus.core.messages.preflight import PreflightOrder
from isthmus.core.priority import Priority
from isthmus.core.views.api_views import JobState

_RELEASE_ORDER = PartOrder(job="j", attempt=1, desired="released")
_ROUNDING_S = 1.0
"""Tolerance for rounding of times since the epoch."""


def part_orders(state: PoolState, cluster: str) -> tuple[PartOrder, ...]:
    """Return the orders for a site: releases first, then the parts that should be there, oldest first.

    Reported parts that the coordinator does not know (of a deleted job or an old attempt) are released; after a
    restore from a backup those that run go on, since their log is lost and not they.
    """
    record = state.clusters.get(cluster)
    if record is None:
        return ()
    held = held_parts(state, cluster)
    releases = [
        PartOrder(job=job, attempt=attempt, desired="released")
        for (job, attempt), part in record.reported_parts.items()
        if (job, attempt) not in record.parts and part.state != "released" and (job, attempt) not in held
    ]
    others = [
        PartOrder(job=job, attempt=attempt, desired="running", priority=_priority(state, job)) for job, attempt in held
    ]
    for part in record.parts.values():
        (releases if part.desired == "released" else others).append(_part_order(state, part))
    return (*releases, *others)


def held_parts(state: PoolState, cluster: str) -> list[PartKey]:
    """Return the running parts at a site that the log does not have since its restore, and that are not to end.

    A part that the log has got since (the site has invented its number) is ordered as a part of the log only.
    """
    restored, record = state.restored, state.clusters.get(cluster)
    if restored is None or record is None:
        return []
    return [
        key
        for key in restored.unknown.get(cluster, ())
        if key not in restored.ended
        and key not in record.parts
        and not (key[0] in state.jobs and state.jobs[key[0]].state in TERMINAL_STATES)
    ]


def _priority(state: PoolState, job_id: str) -> Priority:
    job = state.jobs.get(job_id)
    return job.priority if job else "middle"


def _part_order(state: PoolState, part: PartRecord) -> PartOrder:
    """Return the order of a part; rebuild it only if its content has changed."""
    job = state.jobs[part.job]
    content = (part.desired, part.checkpoint_requested, part.victims, job.rank_map)
    if part.cached_order is None:
        part.cached_order = content, _new_order(state, job, part)
    elif part.cached_order[0] != content:
        part.cached_order = content, _updated_order(job, part, part.cached_order[1])
    order: PartOrder = part.cached_order[1]
    return order


def _updated_order(job: JobRecord, part: PartRecord, order: PartOrder) -> PartOrder:
    """Return `order` with the current values of the fields that can change."""
    if part.desired == "released":
        return _RELEASE_ORDER.model_copy(update={"job": part.job, "attempt": part.attempt})
    update = {"desired": part.desired, "protect": part.checkpoint_requested, "victims": part.victims}
    return order.model_copy(update=update | {"rank_map": job.rank_map})


def _new_order(state: PoolState, job: JobRecord, part: PartRecord) -> PartOrder:
    if part.desired == "released":
        return _RELEASE_ORDER.model_copy(update={"job": part.job, "attempt": part.attempt})
    return PartOrder.model_construct(
        job=part.job,
        attempt=part.attempt,
        desired=part.desired,
        lease_s=state.config.lease_s,
        user=job.user,
        files_at=job.file_clusters,
        versions=needed_versions(state, job, part.cluster),
        links=part_links(state, job.plan, part.cluster),
        switches=plan_switches(state, job.plan, job.spec),
        priority=job.priority,
        protect=part.checkpoint_requested,
        victims=part.victims,
        spec=job.spec,
        plan=job.plan,
        rank_map=job.rank_map,
    )


def preflight_orders(state: PoolState, cluster: str) -> tuple[PreflightOrder, ...]:
    """Return the checks that the site should execute or has executed, until all sites of the job have answered."""
    records = (state.jobs[job_id].preflight for job_id in state.indexes.checking)
    return tuple(record.orders[cluster] for record in records if record is not None and cluster in record.orders)


def site_queue(state: PoolState, cluster: str) -> tuple[str, ...]:
    """Return the pool's jobs in a site's queue in their required order, first to start first."""
    found = []
    for job_id in state.indexes.advertised:
        job = state.jobs.get(job_id)
        if job is not None and job.in_site_queues and (job.attempt, cluster) in job.parts:
            found.append(job_id)
    return tuple(found)


def count_misplaced(state: PoolState, record: ClusterRecord) -> int:
    """Return the number of the pool's jobs that the site last reported out of order."""
    wanted = {job_id: place for place, job_id in enumerate(site_queue(state, record.cluster.name))}
    seen = [wanted[entry.job] for entry in record.reported_queue if entry.attempt and entry.job in wanted]
    return sum(place != other for place, other in zip(seen, sorted(seen), strict=True))


def due_events(state: PoolState, now_s: float, steady_s: float) -> tuple[Event, ...]:
    """Return the events due at `now_s`: lost agents, ended leases, drains and probations, unanswered checks, deadlines.

    Leases are measured by `steady_s`, on a clock that is never set: to end one early would let two attempts run.
    A deadline further ahead than its timeout allows was set before the clock was set back; it has expired.
    """
    due = [*_due_at_sites(state, now_s, steady_s), *budgets_due(state, now_s)]
    for job_id in state.indexes.checking:
        record = state.jobs[job_id].preflight
        if record is not None and abs(now_s - record.asked_s) > state.config.preflight_timeout_s:
            due.append(PreflightTimedOut(now_s=now_s, job_id=job_id, round=record.round))
    for number in sorted(set(_expired_jobs(state, now_s))):
        job = state.jobs[state.indexes.ids_by_number[number]]
        if job.state in ("preempting", "preparing", "starting", "waiting", "running"):
            due.append(DeadlinePassed(now_s=now_s, job_id=job.id, state=job.state, attempt=job.attempt))
    return tuple(due)


def _due_at_sites(state: PoolState, now_s: float, steady_s: float) -> list[Event]:
    """Return what is due at the sites, by kind; one pass, since it runs at every tick of the server."""
    rules = state.config
    lost: list[Event] = []
    proven: list[Event] = []
    drained: list[Event] = []
    unanswered: list[Event] = []
    ended: list[Event] = []
    for name, record in state.clusters.items():
        if record.connected:
            if record.last_report_s is not None and abs(now_s - record.last_report_s) > rules.agent_timeout_s:
                lost.append(AgentLost(now_s=now_s, cluster=name))
            if record.probation is not None and now_s - record.probation.since_s >= PROBATION_S:
                proven.append(ProbationEnded(now_s=now_s, cluster=name))
            if record.check_waits:
                unanswered += _unanswered_peer_checks(state, record, now_s)
        elif (
            record.parts
            and record.run_lease_s > 0
            and record.last_contact_s is not None
            and steady_s - record.last_contact_s > rules.lease_wait_s(record.run_lease_s)
        ):
            ended.append(RunLeaseEnded(now_s=now_s, cluster=name))
        drain = record.drain
        if drain is not None and drain.deadline_s is not None and drain.deadline_s <= now_s:
            drained.append(DrainTimedOut(now_s=now_s, cluster=name))
    return [*lost, *proven, *drained, *unanswered, *ended]


def _unanswered_peer_checks(state: PoolState, record: ClusterRecord, now_s: float) -> Iterator[PeerCheckTimedOut]:
    """Yield the checks of a connected site by others for which a job has waited too long."""
    for target, since_s in record.check_waits.items():
        overdue = abs(now_s - since_s) > state.config.peer_check_timeout_s
        if overdue and state.clusters[target].connected:
            number = record.to_check[target]
            yield PeerCheckTimedOut(now_s=now_s, source=record.cluster.name, target=target, number=number)


def _expired_jobs(state: PoolState, now_s: float) -> Iterator[int]:
    """Yield the numbers of the jobs whose state has timed out."""
    for name, deadlines in state.indexes.deadlines.items():
        if not deadlines:
            continue
        for deadline_s, number in deadlines:
            if deadline_s > now_s:
                break
            yield number
        limit_s = now_s + _longest_s(state.config, name) + _ROUNDING_S
        for deadline_s, number in reversed(deadlines):
            if deadline_s <= limit_s:
                break
            yield number


def _longest_s(rules: CoordinatorConfig, name: JobState) -> float:
    """Return how long a job may be in a state with a deadline."""
    if name == "preempting":
        return max(rules.reservation_timeout_s, rules.checkpoint_timeout_s)
    if name == "preparing":
        return max(rules.reservation_timeout_s, rules.eviction_timeout_s)
    return rules.start_timeout_s if name == "starting" else rules.max_retry_s
