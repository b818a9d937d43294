"""Views of the state for users: jobs with reason, place and possible victims; clusters; the queue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from isthmus.control.queries.accounts.limit_refusals import limit_refusal
from isthmus.control.queries.agent_orders import count_misplaced, held_parts, site_queue
from isthmus.control.queries.catalogue.bring_forecast import describe_bringing
from isthmus.control.queries.catalogue.catalogue_versions import missing_versions
from isthmus.control.queries.preemption_victims import find_victims
from isthmus.control.queries.preflight_status import has_passed_once, needs_preflight
from isthmus.control.queries.shortages import describe_shortages
from isthmus.control.queries.sites.probation_rules import PROBATION_JOBS, PROBATION_S
from isthmus.control.state import allocations
from isthmus.control.state.job_records import (
    TERMINAL_STATES,
    WAITING_STATES,
    ClusterVictim,
    JobRecord,
    PoolState,
)
from isthmus.control.state.queue_order import queue_head, queue_place
from isthmus.control.state.reconcile_log import is_awaited
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.control.state.update_indexes import is_checking
from isthmus.core.pool import Link
from isthmus.core.pool_resource import KBPS_PER_GBPS
from isthmus.core.views.api_views import (
    AgentView,
    ClusterView,
    JobFilter,
    JobView,
    LinkUse,
    PartView,
    PoolView,
    UnknownPart,
    VictimView,
)
from isthmus.core.views.site_views import DutyState, DutyView, ProbationView

SHORT_ID_CHARS = 12
"""Characters of an agent's id that views show."""
MAX_EXAMINED_BYTES = 16 << 20
"""Size of the jobs that are parsed for one page of a list, unless the first is larger."""
MAX_EXAMINED_JOBS = 10_000
"""Jobs that one page of a filtered listing examines: a few milliseconds of the server."""


def job_view(state: PoolState, job: JobRecord, *, details: bool) -> JobView:
    """Return a job as its user sees it; `details` adds its candidate plans and possible victims."""
    return JobView(
        id=job.id,
        name=job.spec.name,
        user=job.user,
        state=job.state,
        reason=_reason(state, job),
        attempt=job.attempt,
        restarts=job.restarts,
        worker_restarts=job.worker_restarts,
        submitted_s=job.submitted_s,
        changed_s=job.changed_s,
        job=job.spec,
        plan=job.plan,
        plans=job.plans if details else None,
        preflight=job.preflight.views() if details and job.preflight else (),
        parts=tuple(_part_view(state, part) for part in job.current_parts() if part.cluster in state.clusters),
        place=queue_place(state, job) if job.in_queue else None,
        offer=tuple(_offered_victims(state, job)) if details else (),
        victims=tuple(_victim_view(state, one) for one in job.victims),
    )


def pool_view(state: PoolState, links: tuple[Link, ...]) -> PoolView:
    """Return every cluster that ever reported, with its free chips."""
    clusters = tuple(
        ClusterView(
            cluster=record.cluster,
            connected=record.connected,
            free_chips=dict(record.free_by_group()),
            free_storage_bytes=record.free_bytes(),
            queue=site_queue(state, name),
            misplaced=count_misplaced(state, record),
            last_report_s=record.last_report_s,
            awaited=is_awaited(state, name),
            unknown_parts=tuple(UnknownPart(job=job, attempt=attempt) for job, attempt in held_parts(state, name)),
            agent=_agent_view(record),
            released_at_s=_released_at_s(state, record),
            jobs=tuple(dict.fromkeys(part.job for part in record.may_run)),
            duty=_duty_view(record),
        )
        for name, record in state.clusters.items()
    )
    use = tuple(
        LinkUse.model_validate({"from": link.cluster, "to": link.name, "reserved_gbps": kbps / KBPS_PER_GBPS})
        for link, kbps in state.allocated_kbps.items()
    )
    return PoolView(clusters=clusters, links=links, use=use)


def _agent_view(record: ClusterRecord) -> AgentView | None:
    """Return the agent that a site is bound to."""
    agent = record.agent
    if agent is None:
        return None
    return AgentView(
        id=agent.id[:SHORT_ID_CHARS],
        enrolled_s=agent.enrolled_s,
        session=agent.session,
        session_s=agent.session_s,
        host=agent.host,
        gone=agent.id in record.gone_agents,
        enrolling=record.enrolling,
        run_lease_s=record.run_lease_s,
    )


def _duty_view(record: ClusterRecord) -> DutyView:
    """Return whether the site takes new parts, and since when not."""
    cordon, drain = record.cordon, record.drain
    probation = record.probation and ProbationView(
        since_s=record.probation.since_s, ends_s=record.probation.since_s + PROBATION_S,
        num_succeeded=record.probation.num_succeeded, num_needed=PROBATION_JOBS,
    )  # fmt: skip
    if cordon is None:
        return DutyView(probation=probation)
    if drain is None:
        return DutyView(state="cordoned", by=cordon.by, since_s=cordon.since_s, probation=probation)
    parts = tuple(dict.fromkeys(part.job for part in record.parts.values()))
    state: DutyState = "leaving" if drain.leaves else ("draining" if parts else "drained")
    return DutyView(
        state=state, by=drain.by, since_s=drain.since_s, deadline_s=drain.deadline_s, jobs=parts, probation=probation
    )


def _released_at_s(state: PoolState, record: ClusterRecord) -> float | None:
    """Return when the parts of a lost site count as ended; None if it is in contact or its workers have no lease."""
    if record.connected or record.last_report_s is None or record.run_lease_s <= 0 or not record.parts:
        return None
    return record.last_report_s + state.config.lease_wait_s(record.run_lease_s)


def find_jobs(
    state: PoolState,
    user: str | None,
    wanted: JobFilter,
    *,
    after: str | None,
    limit: int,
    newest_first: bool,
    max_examined: int = MAX_EXAMINED_JOBS,
) -> tuple[list[JobRecord], str | None]:
    """Return up to `limit` jobs (of one user) that meet `wanted`, and the job after which a next page starts.

    At most `max_examined` jobs are examined, and `MAX_EXAMINED_BYTES` of jobs parsed, so a page may hold fewer than
    `limit` although more follow; the second value is None once none follow.
    """
    user = user or wanted.user
    numbers = state.indexes.ids_by_number if user is None else state.indexes.numbers_by_user.get(user)
    if numbers is None:
        return [], None
    start = None if after is None else state.jobs[after].number
    bounds = (None, start) if newest_first else (start, None)
    found: list[JobRecord] = []
    left_bytes = MAX_EXAMINED_BYTES
    for examined, number in enumerate(numbers.irange(*bounds, inclusive=(False, False), reverse=newest_first)):
        if examined >= max_examined or len(found) >= limit or left_bytes <= 0:
            return found, after
        job = state.jobs[state.indexes.ids_by_number[number]]
        after = job.id
        if not _may_meet(job, wanted):
            continue
        left_bytes -= len(job.packed.job_json)  # its view, or its name, is parsed
        if _meets(state, job, wanted):
            found.append(job)
    return found, None


def _may_meet(job: JobRecord, wanted: JobFilter) -> bool:
    """Return whether a job meets what is asked, as far as its record says without the job being parsed."""
    if wanted.state and job.state not in wanted.state:
        return False
    return wanted.since_s is None or job.submitted_s >= wanted.since_s


def _meets(state: PoolState, job: JobRecord, wanted: JobFilter) -> bool:
    if wanted.name is not None and wanted.name != job.spec.name:
        return False
    if wanted.owner is None:
        return True
    used = job.plan.clusters if job.plan else ()
    return any(name in state.clusters and state.clusters[name].cluster.owner == wanted.owner for name in used)


def iterate_queue(state: PoolState, after: str | None, limit: int) -> Iterator[JobRecord]:
    """Yield up to `limit` jobs of the queue, first to start first, starting after job `after`."""
    keys = queue_head(state)
    if after is not None and state.jobs[after].in_queue:
        keys = islice(keys, queue_place(state, state.jobs[after]), None)
    for _ in range(limit):
        key = next(keys, None)
        if key is None:
            return
        yield state.jobs[state.indexes.ids_by_number[key[2]]]


def _reason(state: PoolState, job: JobRecord) -> str:
    """Return why the job waits or ended, or why it last restarted; and its disconnected sites."""
    reason = _wait_reason(state, job) if job.state in WAITING_STATES else job.reason
    if not reason and job.state not in TERMINAL_STATES:
        reason = job.last_restart_reason
    away = [
        part.cluster
        for part in job.unreleased_parts()
        if job.state not in TERMINAL_STATES and not state.clusters[part.cluster].connected
    ]
    silent = f"{', '.join(dict.fromkeys(away))} is not connected"
    silent += _end_of_silence(state, job)
    if not away or reason.endswith(silent):
        return reason
    return f"{reason}; {silent}" if reason else silent


def _end_of_silence(state: PoolState, job: JobRecord) -> str:
    """Say when a job that is being stopped no longer waits for its lost sites."""
    lost = [state.clusters[part.cluster] for part in job.unreleased_parts() if part.committed]
    lost = [record for record in lost if not record.connected]
    if job.state != "stopping" or not lost or any(record.run_lease_s <= 0 for record in lost):
        return ""
    wait_s = max(state.config.lease_wait_s(record.run_lease_s) for record in lost)
    return f"; its workers count as ended after {wait_s:g} s without contact"


def _wait_reason(state: PoolState, job: JobRecord) -> str:
    """Describe the shortages of the job's plan, or the reservation that blocks it."""
    if job.plan is None or job.state_deadline_s is not None:
        return job.reason
    lacks = describe_shortages(state, job.needs or {})
    if job.capped_by and (refusal := limit_refusal(state, job)):
        why = refusal.text
    elif lacks:
        why = f"plan {job.plan.id} does not fit now: {lacks}"
    elif bringing := describe_bringing(state, job):
        why = f"waits for its model and data: {bringing}"
    elif is_checking(job) and job.preflight is not None:
        why = f"{', '.join(job.preflight.waits_for)} must check the job's files and storage before it starts"
    elif not allocations.fits(state, job.needs or {}, state.indexes.reserved):
        why = f"the chips of plan {job.plan.id} are reserved for jobs ahead of it in the queue"
    else:
        why = job.reason
    return f"{why}; {job.last_restart_reason}" if job.last_restart_reason and job.last_restart_reason != why else why


def _part_view(state: PoolState, part: PartRecord) -> PartView:
    return PartView(
        cluster=part.cluster,
        owner=state.clusters[part.cluster].cluster.owner,
        ranks=part.ranks,
        desired=part.desired,
        observed=part.state,
        detail=part.detail,
        waiting=part.waiting,
        waiting_since_s=part.waiting_since_s,
    )


def _offered_victims(state: PoolState, job: JobRecord) -> Iterator[VictimView]:
    """Yield the jobs that it could preempt, once its sites have passed its checks."""
    if job.id in state.jobs and needs_preflight(state, job) and not has_passed_once(job):
        return
    if missing_versions(state, job) or not allocations.has_capacity(state, job.plan_parts):
        return
    for source in find_victims(state, job):
        for one in source.victims:
            yield _victim_view(state, one)


def _victim_view(state: PoolState, one: ClusterVictim) -> VictimView:
    record = state.clusters[one.cluster]
    part, seen = record.parts.get((one.job, one.attempt)), record.local_jobs.get(one.job)
    found = part if one.attempt else seen
    return VictimView(
        cluster=one.cluster,
        owner=record.cluster.owner,
        job=one.job,
        attempt=one.attempt,
        chips=found.chips if found else {},
        unsaved_s=found.unsaved_s if found else 0.0,
    )
