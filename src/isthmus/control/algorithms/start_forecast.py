"""`forecast_starts`: each waiting job's place, who is ahead, and when it should start, between which bounds.

The queue is played forward: running jobs end when they are expected to, `global_order` chooses what starts on
what they give back, and so on. It is played several times: with everything as predicted, with all runs
sooner and later by a `spread`, and with each run off by chance, within the spread; the band holds all starts.
Where runs are off like that, nine of ten jobs start within it (`python -m benchmarks.global_order`). Arrivals
to come and failures are not in it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from isthmus.control.algorithms.global_order import Objective, Release, Request, global_order

SPREAD = 0.2
"""Part by which a run may end sooner or later than predicted."""

HORIZON = 64
"""So many jobs from the head of the queue are played forward; those behind them have no expected start."""

MOST_AHEAD = 20
"""Of the jobs ahead so many are named, the first."""

EFFORT = 200
"""Nodes of the search at each step of the play: near enough, and a tenth of the time."""

DRAWS = 4
"""How often the queue is played with each run off by chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """When a job should start, in seconds on the clock of `now_s`; inf where nothing that is known starts it.

    `place` counts from 1; `ahead` are the first of those before it that want chips of a queue it wants too.
    """

    place: int
    ahead: tuple[str, ...]
    start_s: float = math.inf
    earliest_s: float = math.inf
    latest_s: float = math.inf


def forecast_starts(
    requests: Iterable[Request],
    free: Mapping[str, int],
    releases: Sequence[Release],
    objective: Objective,
    now_s: float,
    *,
    patience_s: float = math.inf,
    spread: float = SPREAD,
) -> dict[str, Forecast]:
    """Return a forecast for every job, with times for the first `HORIZON` of the order; see `global_order`.

    A request or release of unknown length (`run_s` 0, `at_s` inf) never gives its chips back here: what waits
    for it has start inf, and at least `earliest_s` unless that hangs on it too.
    """
    every = {one.job: one for one in requests}
    order = global_order(every.values(), free, objective, now_s, releases=releases, patience_s=patience_s)
    head = [every[job] for job in order.jobs[:HORIZON]]
    chance = random.Random(0)
    plays = []
    for least, most in (
        (1.0, 1.0),
        (1 - spread,) * 2,
        (1 + spread,) * 2,
        *((1 - spread, 1 + spread),) * DRAWS,
    ):
        runs = [replace(one, run_s=one.run_s * chance.uniform(least, most)) for one in head]
        ends = [
            replace(one, at_s=now_s + (one.at_s - now_s) * chance.uniform(least, most)) for one in releases
        ]
        plays.append(play(runs, free, ends, objective, now_s, patience_s))
    found: dict[str, Forecast] = {}
    ahead = _ahead(order.jobs, every)
    for place, job in enumerate(order.jobs, start=1):
        starts = [play.get(job, math.inf) for play in plays]
        found[job] = Forecast(
            place=place,
            ahead=ahead[job],
            start_s=starts[0],
            earliest_s=min(starts),
            latest_s=max(starts),
        )
    return found


def _ahead(jobs: Sequence[str], every: Mapping[str, Request]) -> dict[str, tuple[str, ...]]:
    """Return for each of `jobs`, given in their order, the first `MOST_AHEAD` that share a queue with it."""
    found: dict[str, tuple[str, ...]] = {}
    firsts: dict[str, dict[str, int]] = {}
    for place, job in enumerate(jobs):
        before: dict[str, int] = {}
        for queue in every[job].needs:
            first = firsts.setdefault(queue, {})
            before |= first
            if len(first) < MOST_AHEAD:
                first[job] = place
        before.pop(job, None)
        found[job] = tuple(sorted(before, key=before.__getitem__)[:MOST_AHEAD])
    return found


def play(
    waiting: Sequence[Request],
    free: Mapping[str, int],
    releases: Sequence[Release],
    objective: Objective,
    now_s: float,
    patience_s: float = math.inf,
) -> dict[str, float]:
    """Return when each job starts if everything lasts as long as it says."""
    left, rest = dict(free), {one.job: one for one in waiting}
    running = [(one.at_s, number, one) for number, one in enumerate(releases)]
    heapq.heapify(running)
    starts: dict[str, float] = {}
    number = len(running)
    while rest:
        started: tuple[str, ...] = ()
        if any(all(left.get(queue, 0) >= n for queue, n in one.needs.items()) for one in rest.values()):
            started = global_order(
                rest.values(),
                left,
                objective,
                now_s,
                releases=[one for _, _, one in running],
                patience_s=patience_s,
                node_limit=EFFORT,
            ).start
        for job in started:
            one = rest.pop(job)
            starts[job] = now_s
            for queue, chips in one.needs.items():
                left[queue] = left.get(queue, 0) - chips
            ends_s = now_s + one.run_s if one.run_s else math.inf
            heapq.heappush(running, (ends_s, number, Release(at_s=ends_s, chips=one.needs)))
            number += 1
        if not running or math.isinf(running[0][0]):
            break
        now_s = max(now_s, running[0][0])
        while running and running[0][0] <= now_s:
            for queue, chips in heapq.heappop(running)[2].chips.items():
                left[queue] = left.get(queue, 0) + chips
    return starts
