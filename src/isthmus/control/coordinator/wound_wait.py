"""`wound`: requeue later jobs that have chips allocated but do not run yet, in favour of an earlier job.

Wound-wait (Rosenkrantz, Stearns and Lewis 1978) by the queue's order: a later job is wounded, an earlier one
never. A slow site that delays a later job's start therefore cannot delay an earlier job.
"""

from __future__ import annotations

from collections.abc import Collection

from isthmus.control.coordinator.attempts import stop_attempt
from isthmus.control.state import allocations
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.update_indexes import queue_key
from isthmus.core.pool_resource import PoolResource


def wound(state: PoolState, job: JobRecord, now_s: float, spared: Collection[str] = ()) -> None:
    """Requeue later jobs that only prepare, except those `spared`, if `job` can then start."""
    lacking = allocations.missing_amounts(state, job.needs or {})
    if not lacking:
        return
    mine, later = queue_key(job), list[JobRecord]()
    for name in state.indexes.preparing | state.indexes.preempting:
        other = state.jobs[name]
        evicting = other.state == "preparing" and other.victims
        gives = other.needs is not None and any(key in other.needs for key in lacking)
        if gives and not evicting and name not in spared and queue_key(other) > mine:
            later.append(other)
    later.sort(key=queue_key, reverse=True)
    wounded = list[JobRecord]()
    for other in later:
        if not lacking:
            break
        given = _freed_by(other)
        if lacking.keys() & given.keys():
            wounded.append(other)
            left = {key: amount - given.get(key, 0) for key, amount in lacking.items()}
            lacking = {key: amount for key, amount in left.items() if amount > 0}
    if lacking:
        return
    for other in wounded:
        stop_attempt(
            state,
            other,
            "waiting",
            f"requeued for job {job.id}, which is ahead of it in the queue",
            now_s,
            kind="refused",
        )


def _freed_by(job: JobRecord) -> allocations.Amounts:
    """Return the amounts that become free if a job that only prepares is stopped."""
    found = dict(job.allocated_kbps)
    for part in job.current_parts():
        for group, chips in part.chips.items():
            own = chips - part.borrowed.get(group, 0) - part.local_chips.get(group, 0)
            found[PoolResource.chips(part.cluster, group)] = own
        found[PoolResource.storage(part.cluster)] = part.storage_bytes
    return found
