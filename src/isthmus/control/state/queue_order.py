"""The order of the queue: by priority, and within a priority by arrival, or by fair share if the log says so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from isthmus.control.accounts.account_tree import PROJECT_PREFIX
from isthmus.control.state.indexes import PRIORITY_RANK, QueueKey
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.update_indexes import queue_key

RANKS = range(-len(PRIORITY_RANK), 2 * len(PRIORITY_RANK))
"""Ranks of jobs in `high`, `middle` and `low` projects; those of jobs without a project are 0 to 2."""


def is_fair(state: PoolState) -> bool:
    """Return whether users share the chips of a priority by their usage, rather than by arrival."""
    return state.shares.half_life_s > 0


def queue_head(state: PoolState, count: int | None = None) -> Iterator[QueueKey]:
    """Yield the first `count` keys of the queue (None: all), first to start first."""
    if is_fair(state):
        return islice(state.shares.order(state.indexes.queued_by_share, RANKS), count)
    return islice(iter(state.indexes.order), count)


def queue_slice(state: PoolState, start: int, count: int, user: str | None = None) -> tuple[list[QueueKey], int]:
    """Return `count` keys of the queue (of one user) from position `start` on, and how many there are in all.

    By arrival it costs the page alone; by fair share the places before it as well.
    """
    if user is not None:
        own = state.indexes.queued_by_user.get(user, ())
        return list(own[start : start + count]), len(own)
    order = state.indexes.order
    if is_fair(state):
        return list(islice(queue_head(state), start, start + count)), len(order)
    return list(order.islice(start, start + count)), len(order)


def queue_place(state: PoolState, job: JobRecord) -> int:
    """Return the job's place in the queue from 1, or the place that it would have if it joined now."""
    key = queue_key(job)
    if is_fair(state):
        return state.shares.place(state.indexes.queued_by_share, job.share_account, key)
    return int(state.indexes.order.bisect_left(key)) + 1


def share_note(state: PoolState, job: JobRecord) -> str:
    """Return what the job's place depends on beside its priority, as text for its user."""
    shares = state.shares
    account, who = job.share_account, f"project {job.project}" if job.project else f"user {job.user}"
    held = shares.usage[account].num_chips if account in shares.usage else 0
    used_h, half_life_h = shares.used_chip_s(account) / 3600, shares.half_life_s / 3600
    weight = shares.weight(account)
    above = "".join(
        f", below project {one.removeprefix(PROJECT_PREFIX)} (weight {shares.weight(one):g}), which shares as a whole"
        for one in shares.paths.get(account, ())[:-1]
        if one != account
    )
    return (
        f"place by fair share: {who} has used {used_h:.1f} chip-hours of late (half-life {half_life_h:g} h, "
        f"weight {weight:g}) and holds {held} chips{above}"
    )
