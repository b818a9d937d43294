"""What follows from the state without changing it: orders to sites, views for users, events that are due."""

from __future__ import annotations

from isthmus.control.events import AgentLost, DeadlinePassed, Event
from isthmus.control.records import ENDED, JobRecord, PartRecord, State
from isthmus.core.messages import PartOrder
from isthmus.core.pool import Link
from isthmus.core.views import ClusterView, JobView, PartView, PoolView

_ROUNDING_S = 1.0
"""More than seconds since the epoch are ever rounded by."""


def orders(state: State, cluster: str) -> tuple[PartOrder, ...]:
    """Return the orders for a site: releases first, then every part promised to it, oldest job first.

    A part that the site reports and nobody knows (of a deleted job, of an attempt long released) is
    ordered released.
    """
    record = state.clusters.get(cluster)
    if record is None:
        return ()
    strays = [
        PartOrder(job=job, attempt=attempt, desired="released")
        for (job, attempt), part in record.reported.items()
        if (job, attempt) not in record.promised and part.state != "released"
    ]
    promised = [_order(state, part) for part in record.promised.values()]
    return tuple(sorted(strays + promised, key=lambda order: order.desired != "released"))


def _order(state: State, part: PartRecord) -> PartOrder:
    if part.desired == "released":
        return PartOrder(job=part.job, attempt=part.attempt, desired="released")
    job = state.jobs[part.job]
    return PartOrder(
        job=part.job,
        attempt=part.attempt,
        desired=part.desired,
        lease_s=state.rules.lease_s,
        user=job.user,
        spec=job.submission.job,
        plan=job.plan,
        rank_map=job.rank_map,
    )


def due(state: State, now_s: float) -> tuple[Event, ...]:
    """Return the events that time alone has brought about by `now_s`.

    A time that lies further ahead than any of the rules could have put it comes from before the clock was
    set back: it has passed.
    """
    rules = state.rules
    longest_s = {"preparing": rules.reservation_s, "starting": rules.start_s, "waiting": rules.retry_most_s}
    lost = [
        AgentLost(now_s=now_s, cluster=name)
        for name, record in state.clusters.items()
        if record.connected
        and record.heard_s is not None
        and abs(now_s - record.heard_s) > rules.agent_lost_s
    ]
    passed = [
        DeadlinePassed(now_s=now_s, job_id=job.id, state=job.state, attempt=job.attempt)
        for job in state.live.values()
        if job.deadline_s is not None
        and job.state in ("preparing", "starting", "waiting")
        and not 0 < job.deadline_s - now_s <= longest_s[job.state] + _ROUNDING_S
    ]
    return (*lost, *passed)


def job_view(state: State, job: JobRecord, *, plans: bool) -> JobView:
    """Return a job as its user sees it, with the candidate plans where `plans` asks for them."""
    return JobView(
        id=job.id,
        name=job.submission.job.name,
        user=job.user,
        state=job.state,
        reason=_reason(state, job),
        attempt=job.attempt,
        restarts=job.restarts,
        submitted_s=job.submitted_s,
        changed_s=job.changed_s,
        job=job.submission.job,
        plan=job.plan,
        plans=job.plans if plans else None,
        parts=tuple(_part_view(state, part) for part in job.present()),
    )


def _reason(state: State, job: JobRecord) -> str:
    """Return why the job waits or how it ended, else its last setback; and which of its sites are away."""
    reason = job.reason or ("" if job.state in ENDED else job.setback)
    away = [
        part.cluster
        for part in job.unreleased()
        if job.state not in ENDED and not state.clusters[part.cluster].connected
    ]
    if not away:
        return reason
    silent = f"{', '.join(dict.fromkeys(away))} is not connected"
    return f"{reason}; {silent}" if reason else silent


def _part_view(state: State, part: PartRecord) -> PartView:
    return PartView(
        cluster=part.cluster,
        owner=state.clusters[part.cluster].cluster.owner,
        ranks=part.ranks,
        desired=part.desired,
        observed=part.state,
        detail=part.detail,
    )


def pool_view(state: State, links: tuple[Link, ...]) -> PoolView:
    """Return every cluster that ever reported, with the chips that a new job could have."""
    clusters = tuple(
        ClusterView(
            cluster=record.cluster,
            connected=record.connected,
            free_chips=record.free(),
            last_report_s=record.heard_s,
        )
        for record in state.clusters.values()
    )
    return PoolView(clusters=clusters, links=links)
