"""`global_order`: the one order in which the waiting jobs of several owners' queues are to start.

Cross-domain pooling report 4.3.1. A job is cut into parts, one in the queue of each of its sites, and starts
only when all of them can. So what is decided is *which jobs start together* on what the queues have free:

    utilisation   those that use most chips
    throughput    the greatest number of jobs
    deadline      jobs with a deadline first, the nearest first; the others for throughput
    arrival       first come, first served

A higher priority goes before any objective. A job that cannot start and whose turn may not be missed
**reserves**: what its queues have free is kept for it, up to its need. That is a job with a deadline that can
still be met (by `deadline`), the first that does not fit (by `arrival`), and under every objective one that
has waited longer than `patience_s`: from then on nobody that comes later takes its chips, so no job waits for
ever. Chips kept are lent to a job that is known to end before the reservation could begin (EASY backfilling,
Lifka 1995), where `releases` tell when that is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from isthmus.control.algorithms.pack_jobs import NODE_LIMIT, Needs, pack_jobs
from isthmus.core.priority import Priority

Objective = Literal["arrival", "utilisation", "throughput", "deadline"]

WINDOW = 64
"""Of each priority so many jobs, the longest waiting, are weighed against each other; those behind them start
where they fit."""

_RANK: Mapping[Priority, int] = {"high": 0, "middle": 1, "low": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A waiting job: chips `needs` at each queue, when it came, when it must have ended, how long it runs.

    Times are seconds on the clock of `now_s`; `deadline_s` None means none, `run_s` 0 that it is unknown.
    """

    job: str
    needs: Needs
    submitted_s: float
    priority: Priority = "middle"
    deadline_s: float | None = None
    run_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Chips that a running job gives back by queue, at the time when it is expected to end."""

    at_s: float
    chips: Needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What starts now, what waits with chips kept for it, and what waits: together the order of the queue.

    `exact` says that no other choice of `start` is better by the objective.
    """

    start: tuple[str, ...]
    reserve: tuple[str, ...]
    wait: tuple[str, ...]
    exact: bool

    @property
    def jobs(self) -> tuple[str, ...]:
        """All jobs, in the order to be pushed into every queue."""
        return self.start + self.reserve + self.wait


def global_order(
    requests: Iterable[Request],
    free: Mapping[str, int],
    objective: Objective,
    now_s: float,
    *,
    releases: Sequence[Release] = (),
    patience_s: float = math.inf,
    node_limit: int = NODE_LIMIT,
) -> Order:
    """Return the order of `requests` on queues with `free` chips each, by `objective`.

    `node_limit` bounds the search for what starts together (`pack_jobs`).
    Deterministic: it depends on the set of requests, not on the order in which they are given.

    Costs 10 to 30 ms of CPU at 10,000 requests on 40 queues, 0.2 to 0.5 s at 100,000, most of it sorting
    (`python -m benchmarks.global_order`): to be asked when chips have come free or jobs have come, not at
    every event, and of a longer queue for its head.
    """
    books = _Books(dict(free), now_s, releases)
    order = sorted(requests, key=lambda one: (_RANK[one.priority], one.submitted_s, one.job))
    waiting: list[Request] = []
    exact = True
    for _, group in groupby(order, key=lambda one: _RANK[one.priority]):
        whole = list(group)
        for one in _in_turn(whole, objective, now_s, patience_s):
            if not books.start(one):
                books.reserve(one)
        rest = [one for one in whole if one.job not in books.known]
        weighed, best = _weigh(rest[:WINDOW], books.left, objective, node_limit)
        exact = exact and best and (len(rest) <= WINDOW or objective == "arrival")
        for one in (*weighed, *rest):
            if one.job in books.known or books.start(one):
                continue
            if objective == "arrival" and not books.reserved:
                books.reserve(one)
        waiting += [one for one in rest if one.job not in books.known]
    lent = {one.job for one in waiting if books.lend(one)}
    return Order(
        start=tuple(books.started),
        reserve=tuple(one.job for one in books.reserved),
        wait=tuple(one.job for one in waiting if one.job not in lent),
        exact=exact,
    )


def _in_turn(rest: Sequence[Request], objective: Objective, now_s: float, patience_s: float) -> list[Request]:
    """Return the jobs that nobody of their priority may overtake, in the order of their turns."""
    waited = [one for one in rest if now_s - one.submitted_s > patience_s]
    if objective != "deadline":
        return waited
    due = [
        (one.deadline_s, one.submitted_s, one.job, one)
        for one in rest
        if one.deadline_s is not None
        and now_s + one.run_s <= one.deadline_s
        and now_s - one.submitted_s <= patience_s
    ]
    return [*waited, *(one for *_, one in sorted(due, key=lambda each: each[:3]))]


def _weigh(
    rest: Sequence[Request], left: Mapping[str, int], objective: Objective, node_limit: int
) -> tuple[list[Request], bool]:
    """Return which jobs of one priority start on what is left, first to start first, and whether exactly."""
    if objective == "arrival":
        return [], True
    values = [float(sum(one.needs.values())) if objective == "utilisation" else 1.0 for one in rest]
    packing = pack_jobs(values, [one.needs for one in rest], left, node_limit)
    chosen = sorted(packing.chosen, key=lambda index: (-values[index], index))
    return [rest[index] for index in chosen], packing.exact


class _Books:
    """Who has started and who reserves; `left` is free for all, `kept` for those that reserve."""

    def __init__(self, left: dict[str, int], now_s: float, releases: Sequence[Release]) -> None:
        self.left, self.now_s = left, now_s
        self.kept: dict[str, int] = {}
        self.started: list[str] = []
        self.reserved: list[Request] = []
        self.known: set[str] = set()
        self._coming = _coming(releases)
        self._begin_s: dict[str, float] = {}

    def start(self, one: Request) -> bool:
        """Start a job if all it needs is free for all."""
        if any(self.left.get(queue, 0) < n for queue, n in one.needs.items()):
            return False
        for queue, n in one.needs.items():
            self.left[queue] -= n
        self.started.append(one.job)
        self.known.add(one.job)
        return True

    def reserve(self, one: Request) -> None:
        """Keep what its queues have, up to its need, and note when it could begin."""
        begin_s = self._beginning_s(one)
        for queue, n in one.needs.items():
            taken = min(n, self.left.get(queue, 0))
            self.left[queue] = self.left.get(queue, 0) - taken
            self.kept[queue] = self.kept.get(queue, 0) + taken
            self._begin_s[queue] = min(begin_s, self._begin_s.get(queue, math.inf))
        self.reserved.append(one)
        self.known.add(one.job)

    def lend(self, one: Request) -> bool:
        """Start a job on chips that are kept, if it is known to end before any of them is needed."""
        if not one.run_s:
            return False
        for queue, n in one.needs.items():
            short = n - self.left.get(queue, 0)
            late = self.now_s + one.run_s > self._begin_s.get(queue, math.inf)
            if short > self.kept.get(queue, 0) or (short > 0 and late):
                return False
        for queue, n in one.needs.items():
            open_chips = min(n, self.left.get(queue, 0))
            self.left[queue] = self.left.get(queue, 0) - open_chips
            self.kept[queue] = self.kept.get(queue, 0) - (n - open_chips)
        self.started.append(one.job)
        return True

    def _beginning_s(self, one: Request) -> float:
        """Return when the job could begin; -inf where that is not known, so that nothing is lent.

        What other reservations keep counts as theirs.
        """
        at_s = self.now_s
        for queue, n in one.needs.items():
            short = n - self.left.get(queue, 0)
            if short > 0:
                times_s, sums = self._coming.get(queue, ((), ()))
                place = bisect_left(sums, short)
                if place == len(sums) or math.isinf(times_s[place]):
                    return -math.inf
                at_s = max(at_s, times_s[place])
        return at_s


def _coming(releases: Sequence[Release]) -> dict[str, tuple[list[float], list[int]]]:
    """Return for each queue when chips come back, and how many have by then."""
    found: dict[str, tuple[list[float], list[int]]] = {}
    for release in sorted(releases, key=lambda one: one.at_s):
        for queue, chips in release.chips.items():
            times_s, sums = found.setdefault(queue, ([], [0]))
            times_s.append(release.at_s)
            sums.append(sums[-1] + chips)
    return {queue: (times_s, sums[1:]) for queue, (times_s, sums) in found.items()}
