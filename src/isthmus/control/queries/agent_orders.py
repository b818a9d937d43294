"""What follows from the state without changing it: orders to sites, their queues, events that are due."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.state.events import AgentLost, DeadlinePassed, Event
from isthmus.control.state.job_records import JobRecord, State
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.messages.agent_messages import PartOrder

_RELEASE = PartOrder(job="j", attempt=1, desired="released")
_ROUNDING_S = 1.0
"""More than seconds since the epoch are ever rounded by."""


def orders(state: State, cluster: str) -> tuple[PartOrder, ...]:
    """Return the orders for a site: releases first, then every part that should be there, oldest first.

    A part that the site reports and nobody knows (of a deleted job, of an attempt long released) is
    ordered released.
    """
    record = state.clusters.get(cluster)
    if record is None:
        return ()
    releases = [
        PartOrder(job=job, attempt=attempt, desired="released")
        for (job, attempt), part in record.reported.items()
        if (job, attempt) not in record.parts and part.state != "released"
    ]
    others = list[PartOrder]()
    for part in record.parts.values():
        (releases if part.desired == "released" else others).append(_order(state, part))
    return (*releases, *others)


def _order(state: State, part: PartRecord) -> PartOrder:
    """Return a part's order, made anew only where it says something else than the last one."""
    job = state.jobs[part.job]
    says = (part.desired, part.protect, part.victims, job.rank_map)
    if part.order is None:
        part.order = says, _write(state, job, part)
    elif part.order[0] != says:
        part.order = says, _rewrite(job, part, part.order[1])
    written: PartOrder = part.order[1]
    return written


def _rewrite(job: JobRecord, part: PartRecord, order: PartOrder) -> PartOrder:
    """Return a part's order with what has changed of it since it was written."""
    if part.desired == "released":
        return _RELEASE.model_copy(update={"job": part.job, "attempt": part.attempt})
    update = {"desired": part.desired, "protect": part.protect, "victims": part.victims}
    return order.model_copy(update=update | {"rank_map": job.rank_map})


def _write(state: State, job: JobRecord, part: PartRecord) -> PartOrder:
    if part.desired == "released":
        return _RELEASE.model_copy(update={"job": part.job, "attempt": part.attempt})
    return PartOrder.model_construct(
        job=part.job,
        attempt=part.attempt,
        desired=part.desired,
        lease_s=state.rules.lease_s,
        user=job.user,
        files_at=job.trained_at,
        priority=job.priority,
        protect=part.protect,
        victims=part.victims,
        spec=job.wanted,
        plan=job.plan,
        rank_map=job.rank_map,
    )


def queue(state: State, cluster: str) -> tuple[str, ...]:
    """Return the order in which the pool's jobs should stand in a site's queue, first to start first."""
    found = []
    for job_id in state.indexes.pushed:
        job = state.jobs.get(job_id)
        if job is not None and job.enqueued and (job.attempt, cluster) in job.parts:
            found.append(job_id)
    return tuple(found)


def misplaced(state: State, record: ClusterRecord) -> int:
    """Return how many of the pool's jobs a site last reported out of their order."""
    wanted = {job_id: place for place, job_id in enumerate(queue(state, record.cluster.name))}
    seen = [wanted[entry.job] for entry in record.queue if entry.attempt and entry.job in wanted]
    return sum(place != other for place, other in zip(seen, sorted(seen), strict=True))


def due(state: State, now_s: float) -> tuple[Event, ...]:
    """Return the events that time alone has brought about by `now_s`.

    A time that lies further ahead than any of the rules could have put it comes from before the clock was
    set back: it has passed.
    """
    lost = [
        AgentLost(now_s=now_s, cluster=name)
        for name, record in state.clusters.items()
        if record.connected
        and record.heard_s is not None
        and abs(now_s - record.heard_s) > state.rules.agent_lost_s
    ]
    passed = [state.jobs[state.indexes.numbers[number]] for number in sorted(set(_passed(state, now_s)))]
    return (
        *lost,
        *(
            DeadlinePassed(now_s=now_s, job_id=job.id, state=job.state, attempt=job.attempt)
            for job in passed
            if job.state in ("preempting", "preparing", "starting", "waiting")
        ),
    )


def _passed(state: State, now_s: float) -> Iterator[int]:
    rules = state.rules
    longest_s = {
        "preempting": max(rules.reservation_s, rules.protect_s),
        "preparing": max(rules.reservation_s, rules.evict_s),
        "starting": rules.start_s,
        "waiting": rules.retry_most_s,
    }
    for name, book in state.indexes.timed.items():
        for deadline_s, number in book:
            if deadline_s > now_s:
                break
            yield number
        for deadline_s, number in reversed(book):
            if deadline_s - now_s <= longest_s[name] + _ROUNDING_S:
                break
            yield number
