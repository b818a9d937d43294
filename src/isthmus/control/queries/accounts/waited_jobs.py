"""`waited_jobs`: the jobs of some users that were submitted in a period, with their waiting times so far."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from isthmus.control.state.job_history import HistoryEntry
from isthmus.control.state.job_records import TERMINAL_STATES, JobRecord, PoolState
from isthmus.core.views.api_views import HistoryKind
from isthmus.core.views.wait_views import WaitedJob

MAX_EXAMINED_BYTES = 16 << 20
"""Size of the jobs that are parsed for one page, unless the first is larger."""
MAX_EXAMINED_JOBS = 10_000
"""Jobs that one page looks at: a few milliseconds of the server."""

_ENDINGS: frozenset[HistoryKind] = frozenset(
    {"lost", "refused", "preempted", "moved", "stopping", "finished", "failed", "cancelled"}
)


@dataclass(slots=True)
class _Training:
    """The time that one attempt trained, and its last checkpoint. `ended_s` is None while it trains."""

    began_s: float
    saved_s: float
    ended_s: float | None = None


def waited_jobs(
    state: PoolState,
    users: Collection[str],
    begin_s: float,
    end_s: float,
    now_s: float,
    *,
    after: int = 0,
    limit: int = 1000,
    max_examined: int = MAX_EXAMINED_JOBS,
) -> tuple[list[WaitedJob], int | None]:
    """Return up to `limit` jobs of `users` submitted in [begin_s, end_s), and the number after which a page follows.

    `after` is such a number. A page may hold fewer jobs although more follow; the number is None once none follow.
    Deleted jobs are gone.
    """
    known = (state.indexes.numbers_by_user.get(user) for user in users)
    numbers = heapq.merge(*(own.irange(after, None, inclusive=(False, False)) for own in known if own is not None))
    found: list[WaitedJob] = []
    left_bytes = MAX_EXAMINED_BYTES
    for examined, number in enumerate(numbers):
        if examined >= max_examined or len(found) >= limit or left_bytes <= 0:
            return found, after
        job = state.jobs[state.indexes.ids_by_number[number]]
        after = number
        if job.submitted_s >= end_s:
            return found, None
        if job.submitted_s >= begin_s:
            left_bytes -= len(job.packed.job_json)
            found.append(_waited_job(job, now_s))
    return found, None


def _waited_job(job: JobRecord, now_s: float) -> WaitedJob:
    is_open = job.state not in TERMINAL_STATES
    trainings = _trainings(job.history.entries)
    end_s, ran_s = (now_s if is_open else job.changed_s), 0.0
    for training in trainings:
        ran_s += training.saved_s - training.began_s
    last = trainings[-1] if trainings else None
    if last is not None and (not is_open or last.ended_s is None):  # its work counts up to the end
        end_s = max(end_s, last.began_s) if last.ended_s is None else last.ended_s
        ran_s += end_s - last.saved_s
    ran_s = max(0.0, ran_s)
    return WaitedJob(
        job=job.id,
        user=job.user,
        submitted_s=job.submitted_s,
        waited_s=max(0.0, end_s - job.submitted_s - ran_s),
        ran_s=ran_s,
        started=bool(trainings),
        open=is_open,
        chips=_chips(job),
        kinds=job.spec.placement.chips,
        priority=job.own_priority or job.priority,
    )


def _chips(job: JobRecord) -> int:
    """Return the chips of the job's plan, which an ended job keeps without its parts; 0 without one."""
    if job.plan_parts or job.plan is None:
        return job.num_chips
    return sum(sum(part.chips.values()) for part in job.plan.parts())


def _trainings(entries: Iterable[HistoryEntry]) -> list[_Training]:
    """Return the trainings of a history, oldest first; what the history has dropped is not among them."""
    found: list[_Training] = []
    for entry in entries:
        last = found[-1] if found and found[-1].ended_s is None else None
        if entry.kind == "started":
            if last is not None:
                last.ended_s = entry.time_s
            found.append(_Training(entry.time_s, entry.time_s))
        elif last is not None and entry.kind == "checkpoint":
            last.saved_s = max(last.saved_s, entry.time_s)
        elif last is not None and entry.kind in _ENDINGS:
            last.ended_s = max(last.saved_s, entry.time_s)
    return found
