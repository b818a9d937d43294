"""`global_order`: one start order for the waiting jobs of several owners' queues.

Cross-domain pooling report 4.3.1. A job has one part in the queue of each of its sites and starts only when
all parts can start. `global_order` therefore chooses *which jobs start together* on the free chips:

    utilisation   the jobs that use the most chips
    throughput    the greatest number of jobs
    deadline      jobs with a deadline first, earliest deadline first; the others by throughput
    arrival       first come, first served

Priority comes before the objective. Some jobs that cannot start yet **reserve** the free chips of their
queues, up to their need: a job whose deadline can still be met (`deadline`), the first job that does not fit
(`arrival`), and under every objective a job that has waited longer than `patience_s`. Later jobs cannot take
reserved chips, so no job starves. If `releases` give the start of a reservation, jobs that end before it may
run on the reserved chips (EASY backfilling, Lifka 1995).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from isthmus.control.algorithms.knapsack import NODE_LIMIT, ChipsByQueue, pack_jobs
from isthmus.core.pool_resource import PoolResource
from isthmus.core.priority import Priority

Objective = Literal["arrival", "utilisation", "throughput", "deadline"]

PACKING_WINDOW = 64
"""Jobs per priority, longest waiting first, that are packed together; later jobs start where they fit."""

_PRIORITY_RANK: Mapping[Priority, int] = {"high": 0, "middle": 1, "low": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingJob:
    """A waiting job. Times are seconds on the clock of `now_s`."""

    job: str
    # Chips needed at each queue.
    needs: ChipsByQueue
    submitted_s: float
    priority: Priority = "middle"
    # When the job must have ended; None: no deadline.
    deadline_s: float | None = None
    # Expected run time; 0: unknown.
    run_s: float = 0.0
    # Place among the jobs of its priority by fair share, before the time of submission; 0 for all: by arrival.
    turn: int = 0
    # Rank of its project: -1 for `high`, 1 for `low`; it comes before the priority.
    project_rank: int = 0

    @property
    def rank(self) -> int:
        """The rank by the priorities of project and job; jobs of the lowest rank go first."""
        return 3 * self.project_rank + _PRIORITY_RANK[self.priority]


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Chips by queue that a running job releases at its expected end `at_s`."""

    at_s: float
    chips: ChipsByQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOrder:
    """The order of the queue: jobs that start now, jobs that wait with a reservation, jobs that wait."""

    start: tuple[str, ...]
    reserve: tuple[str, ...]
    wait: tuple[str, ...]
    # True if `start` is proven optimal for the objective.
    exact: bool

    @property
    def jobs(self) -> tuple[str, ...]:
        """All jobs, in the order that every queue should have."""
        return self.start + self.reserve + self.wait


def global_order(
    waiting_jobs: Iterable[WaitingJob],
    free: Mapping[PoolResource, int],
    objective: Objective,
    now_s: float,
    *,
    releases: Sequence[Release] = (),
    patience_s: float = math.inf,
    node_limit: int = NODE_LIMIT,
) -> QueueOrder:
    """Return the order of the waiting jobs on queues with `free` chips each, by `objective`.

    `node_limit` bounds the search for the jobs that start together (`pack_jobs`).
    Deterministic: the result does not depend on the order of `waiting_jobs`.

    Takes 10 to 30 ms of CPU for 10,000 jobs on 40 queues and 0.2 to 0.5 s for 100,000, most of it sorting
    (`python -m benchmarks.global_order`). Call it when chips become free or jobs arrive, not at every event;
    for longer queues pass only the head.
    """
    accounts = _ChipAccounts(dict(free), now_s, releases)
    order = sorted(waiting_jobs, key=lambda one: (one.rank, one.turn, one.submitted_s, one.job))
    unplaced: list[WaitingJob] = []
    exact = True
    for _, group in groupby(order, key=lambda one: one.rank):
        jobs = list(group)
        # Step 1: start or reserve the jobs that later ones must not overtake.
        for one in _reserving_jobs(jobs, objective, now_s, patience_s):
            if not accounts.start(one):
                accounts.reserve(one)
        # Step 2: pack the first jobs of this priority by the objective.
        rest = [one for one in jobs if one.job not in accounts.decided]
        packed, is_optimal = _choose_starts(rest[:PACKING_WINDOW], accounts.free, objective, node_limit)
        exact = exact and is_optimal and (len(rest) <= PACKING_WINDOW or objective == "arrival")
        # Step 3: start the packed jobs, then every other job that fits.
        for one in (*packed, *rest):
            if one.job in accounts.decided or accounts.start(one):
                continue
            if objective == "arrival" and not accounts.reservers:
                accounts.reserve(one)
        unplaced += [one for one in rest if one.job not in accounts.decided]
    # Step 4: backfill reserved chips with jobs that end before the reservation begins.
    backfilled = {one.job for one in unplaced if accounts.backfill(one)}
    return QueueOrder(
        start=tuple(accounts.started),
        reserve=tuple(one.job for one in accounts.reservers),
        wait=tuple(one.job for one in unplaced if one.job not in backfilled),
        exact=exact,
    )


def _reserving_jobs(
    jobs: Sequence[WaitingJob], objective: Objective, now_s: float, patience_s: float
) -> list[WaitingJob]:
    """Return the jobs that no job of the same priority may overtake, in their order."""
    waited = [one for one in jobs if now_s - one.submitted_s > patience_s]
    if objective != "deadline":
        return waited
    due = [
        (one.deadline_s, one.submitted_s, one.job, one)
        for one in jobs
        if one.deadline_s is not None and now_s + one.run_s <= one.deadline_s and now_s - one.submitted_s <= patience_s
    ]
    return [*waited, *(one for *_, one in sorted(due, key=lambda each: each[:3]))]


def _choose_starts(
    jobs: Sequence[WaitingJob], free: Mapping[PoolResource, int], objective: Objective, node_limit: int
) -> tuple[list[WaitingJob], bool]:
    """Return the jobs of one priority that start on the free chips, in order; and whether that is optimal."""
    if objective == "arrival":
        return [], True
    values = [float(sum(one.needs.values())) if objective == "utilisation" else 1.0 for one in jobs]
    packing = pack_jobs(values, [one.needs for one in jobs], free, node_limit)
    chosen = sorted(packing.chosen, key=lambda index: (-values[index], index))
    return [jobs[index] for index in chosen], packing.exact


class _ChipAccounts:
    """Started and reserving jobs; chips in `free` are free for all jobs, those in `reserved_chips` are reserved."""

    def __init__(self, free: dict[PoolResource, int], now_s: float, releases: Sequence[Release]) -> None:
        self.free, self.now_s = free, now_s
        self.reserved_chips: dict[PoolResource, int] = {}
        self.started: list[str] = []
        self.reservers: list[WaitingJob] = []
        self.decided: set[str] = set()
        self._releases = _cumulative_releases(releases)
        self._reservation_start_s: dict[PoolResource, float] = {}

    def start(self, job: WaitingJob) -> bool:
        """Start a job if its chips are free and unreserved; return whether it started."""
        if any(self.free.get(queue, 0) < n for queue, n in job.needs.items()):
            return False
        for queue, n in job.needs.items():
            self.free[queue] -= n
        self.started.append(job.job)
        self.decided.add(job.job)
        return True

    def reserve(self, job: WaitingJob) -> None:
        """Reserve the free chips of its queues, up to its need, and record when the job could start."""
        begin_s = self._earliest_start_s(job)
        for queue, n in job.needs.items():
            taken = min(n, self.free.get(queue, 0))
            self.free[queue] = self.free.get(queue, 0) - taken
            self.reserved_chips[queue] = self.reserved_chips.get(queue, 0) + taken
            self._reservation_start_s[queue] = min(begin_s, self._reservation_start_s.get(queue, math.inf))
        self.reservers.append(job)
        self.decided.add(job.job)

    def backfill(self, job: WaitingJob) -> bool:
        """Start a job on reserved chips if it ends before the reservations begin; return whether it did."""
        if not job.run_s:
            return False
        for queue, n in job.needs.items():
            short = n - self.free.get(queue, 0)
            late = self.now_s + job.run_s > self._reservation_start_s.get(queue, math.inf)
            if short > self.reserved_chips.get(queue, 0) or (short > 0 and late):
                return False
        for queue, n in job.needs.items():
            unreserved = min(n, self.free.get(queue, 0))
            self.free[queue] = self.free.get(queue, 0) - unreserved
            self.reserved_chips[queue] = self.reserved_chips.get(queue, 0) - (n - unreserved)
        self.started.append(job.job)
        return True

    def _earliest_start_s(self, job: WaitingJob) -> float:
        """Return when the job could start; -inf if unknown, so that nothing is backfilled.

        Chips of other reservations are not counted.
        """
        at_s = self.now_s
        for queue, n in job.needs.items():
            short = n - self.free.get(queue, 0)
            if short > 0:
                times_s, sums = self._releases.get(queue, ((), ()))
                place = bisect_left(sums, short)
                if place == len(sums) or math.isinf(times_s[place]):
                    return -math.inf
                at_s = max(at_s, times_s[place])
        return at_s


def _cumulative_releases(releases: Sequence[Release]) -> dict[PoolResource, tuple[list[float], list[int]]]:
    """Return for each queue the release times, ascending, and the chips released up to each."""
    found: dict[PoolResource, tuple[list[float], list[int]]] = {}
    for release in sorted(releases, key=lambda one: one.at_s):
        for queue, chips in release.chips.items():
            times_s, sums = found.setdefault(queue, ([], [0]))
            times_s.append(release.at_s)
            sums.append(sums[-1] + chips)
    return {queue: (times_s, sums[1:]) for queue, (times_s, sums) in found.items()}
