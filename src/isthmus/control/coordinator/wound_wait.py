"""`wound`: who has been promised chips, but runs nothing yet, gives way to a job before it in the queue.

Wound-wait (Rosenkrantz, Stearns and Lewis 1978) by the queue's order: the later job is sent back to wait, an
earlier one never is. So no promise that a slow site draws out delays whoever comes before.
"""

from __future__ import annotations

from collections.abc import Collection

from isthmus.control.coordinator.attempts import stop
from isthmus.control.state import ledger
from isthmus.control.state.job_records import JobRecord, State
from isthmus.control.state.queue_index import key_of


def wound(state: State, job: JobRecord, now_s: float, spared: Collection[str] = ()) -> None:
    """Take back what later jobs only prepare, where `job` can start with that; none of those `spared`."""
    lacking = _lacking(state, job)
    if not lacking:
        return
    mine, later = key_of(job), list[JobRecord]()
    for name in state.indexes.preparing | state.indexes.preempting:
        other = state.jobs[name]
        evicting = other.state == "preparing" and other.victims
        gives = other.needs is not None and any(key in other.needs for key in lacking)
        if gives and not evicting and name not in spared and key_of(other) > mine:
            later.append(other)
    later.sort(key=key_of, reverse=True)
    wounded = list[JobRecord]()
    for other in later:
        if not lacking:
            break
        given = _given(other)
        if lacking.keys() & given.keys():
            wounded.append(other)
            left = {key: amount - given.get(key, 0) for key, amount in lacking.items()}
            lacking = {key: amount for key, amount in left.items() if amount > 0}
    if lacking:
        return
    for other in wounded:
        stop(state, other, "waiting", f"made way for job {job.id}, which is before it in the queue", now_s)


def _lacking(state: State, job: JobRecord) -> dict[str, int]:
    """Return what the job lacks, less what wounded jobs are giving back already."""
    needs = job.needs or {}
    found = {key: amount - ledger.free_of(state, key) for key, amount in needs.items()}
    return {key: amount for key, amount in found.items() if amount > 0}


def _given(job: JobRecord) -> dict[str, int]:
    """Return what the pool has again when a job lets go that has not begun."""
    found = dict(job.on_links)
    for part in job.present():
        for group, chips in part.chips.items():
            found[f"{part.cluster}/{group}"] = chips - part.borrowed.get(group, 0) - part.local.get(group, 0)
        found[f"{part.cluster}:storage"] = part.storage_bytes
    return found
