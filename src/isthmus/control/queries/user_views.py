"""Views of the state for users: jobs with reason, place and possible victims; clusters; the queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isthmus.control.queries.agent_orders import misplaced, queue
from isthmus.control.queries.victims import offer
from isthmus.control.state import ledger
from isthmus.control.state.job_records import ENDED, WAITING, JobRecord, State, VictimAt
from isthmus.control.state.queue_index import key_of
from isthmus.control.state.site_records import PartRecord
from isthmus.core.messages.api_views import ClusterView, JobView, PartView, PoolView, VictimView
from isthmus.core.pool import Link


def job_view(state: State, job: JobRecord, *, details: bool) -> JobView:
    """Return a job as its user sees it; `details` adds its candidate plans and possible victims."""
    return JobView(
        id=job.id,
        name=job.wanted.name,
        user=job.user,
        state=job.state,
        reason=_reason(state, job),
        attempt=job.attempt,
        restarts=job.restarts,
        submitted_s=job.submitted_s,
        changed_s=job.changed_s,
        job=job.wanted,
        plan=job.plan,
        plans=job.plans if details else None,
        parts=tuple(_part_view(state, part) for part in job.present()),
        place=state.indexes.order.index(key_of(job)) + 1 if job.ordered else None,
        offer=tuple(_offered(state, job)) if details else (),
        victims=tuple(_victim(state, one) for one in job.victims),
    )


def pool_view(state: State, links: tuple[Link, ...]) -> PoolView:
    """Return every cluster that ever reported, with its free chips."""
    clusters = tuple(
        ClusterView(
            cluster=record.cluster,
            connected=record.connected,
            free_chips=record.free(),
            free_storage_bytes=record.free_bytes(),
            queue=queue(state, name),
            misplaced=misplaced(state, record),
            last_report_s=record.heard_s,
        )
        for name, record in state.clusters.items()
    )
    return PoolView(clusters=clusters, links=links)


def list_jobs(state: State, user: str | None, after: str | None, limit: int | None) -> Iterator[JobRecord]:
    """Yield up to `limit` jobs (of one user), oldest first, starting after job `after`."""
    numbers: Iterable[int] = state.indexes.numbers
    if user is not None:
        numbers = state.indexes.of_user.get(user, ())
    if after is not None and numbers:
        numbers = numbers.irange(state.jobs[after].number, inclusive=(False, True))  # type: ignore[attr-defined]
    left = len(state.jobs) if limit is None else limit
    for number in numbers:
        if left <= 0:
            return
        left -= 1
        yield state.jobs[state.indexes.numbers[number]]


def list_queue(state: State, after: str | None, limit: int) -> Iterator[JobRecord]:
    """Yield up to `limit` jobs of the queue, first to start first, starting after job `after`."""
    order = state.indexes.order
    keys = iter(order)
    if after is not None:
        keys = order.irange(key_of(state.jobs[after]), inclusive=(False, True))
    for _ in range(limit):
        key = next(keys, None)
        if key is None:
            return
        yield state.jobs[state.indexes.numbers[key[2]]]


def _reason(state: State, job: JobRecord) -> str:
    """Return why the job waits or ended, or why it last restarted; and its disconnected sites."""
    reason = _why_it_waits(state, job) if job.state in WAITING else job.reason
    if not reason and job.state not in ENDED:
        reason = job.setback
    away = [
        part.cluster
        for part in job.unreleased()
        if job.state not in ENDED and not state.clusters[part.cluster].connected
    ]
    silent = f"{', '.join(dict.fromkeys(away))} is not connected"
    if not away or reason.endswith(silent):
        return reason
    return f"{reason}; {silent}" if reason else silent


def _why_it_waits(state: State, job: JobRecord) -> str:
    """Describe the shortages of the job's plan, or the reservation that blocks it."""
    if job.plan is None or job.deadline_s is not None:
        return job.reason
    lacks = ledger.lacks(state, job)
    if lacks:
        why = f"plan {job.plan.id} does not fit now: {lacks}"
    elif not ledger.fits(state, job.needs or {}, state.indexes.kept):
        why = f"the chips of plan {job.plan.id} are reserved for jobs ahead of it in the queue"
    else:
        why = job.reason
    return f"{why}; {job.setback}" if job.setback and job.setback != why else why


def _part_view(state: State, part: PartRecord) -> PartView:
    return PartView(
        cluster=part.cluster,
        owner=state.clusters[part.cluster].cluster.owner,
        ranks=part.ranks,
        desired=part.desired,
        observed=part.state,
        detail=part.detail,
    )


def _offered(state: State, job: JobRecord) -> Iterator[VictimView]:
    for source in offer(state, job):
        for one in source.at:
            yield _victim(state, one)


def _victim(state: State, one: VictimAt) -> VictimView:
    record = state.clusters[one.cluster]
    part, seen = record.parts.get((one.job, one.attempt)), record.local.get(one.job)
    found = part if one.attempt else seen
    return VictimView(
        cluster=one.cluster,
        owner=record.cluster.owner,
        job=one.job,
        attempt=one.attempt,
        chips=found.chips if found else {},
        unsaved_s=found.unsaved_s if found else 0.0,
    )
