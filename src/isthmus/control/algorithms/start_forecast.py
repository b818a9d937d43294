"""`forecast_starts`: place, jobs ahead and expected start, with bounds, of each waiting job.

The queue is simulated: running jobs end as expected, `global_order` chooses the jobs that start on the
released chips, and so on. Several runs are made: all durations as predicted, all shorter and all longer by
`spread`, and each scaled at random within the spread. The bounds enclose the starts of all runs. If real
durations vary like that, nine of ten jobs start within the bounds (`python -m benchmarks.global_order`).
Future arrivals and failures are not modelled.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from isthmus.control.algorithms.global_order import Objective, Release, WaitingJob, global_order
from isthmus.core.pool_resource import PoolResource

RUNTIME_SPREAD = 0.2
"""Relative deviation of a run time from its prediction, both ways."""

MAX_FORECAST_JOBS = 64
"""Jobs from the head of the queue that are simulated; later ones have no expected start."""

MAX_JOBS_AHEAD = 20
"""Largest number of jobs named in `StartForecast.ahead`."""

SEARCH_NODES = 200
"""Search nodes per simulated step: close to optimal in a tenth of the time."""

NUM_RANDOM_RUNS = 4
"""Simulated runs with random deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartForecast:
    """Expected start of a job, in seconds on the clock of `now_s`; inf if no known release starts it."""

    # Place in the order, from 1.
    place: int
    # The first jobs before it that need chips of the same queues.
    ahead: tuple[str, ...]
    start_s: float = math.inf
    earliest_s: float = math.inf
    latest_s: float = math.inf


def forecast_starts(
    waiting: Iterable[WaitingJob],
    free: Mapping[PoolResource, int],
    releases: Sequence[Release],
    objective: Objective,
    now_s: float,
    *,
    patience_s: float = math.inf,
    spread: float = RUNTIME_SPREAD,
) -> dict[str, StartForecast]:
    """Return a forecast for every job, with times for the first `MAX_FORECAST_JOBS` of the order; see `global_order`.

    A job or release of unknown duration (`run_s` 0, `at_s` inf) never releases its chips: jobs that wait for
    them have start inf.
    """
    every = {one.job: one for one in waiting}
    order = global_order(every.values(), free, objective, now_s, releases=releases, patience_s=patience_s)
    head = [every[job] for job in order.jobs[:MAX_FORECAST_JOBS]]
    generator = random.Random(0)  # noqa: S311 - seeded, so that runs repeat; no secret
    runs = []
    for least, most in (
        (1.0, 1.0),
        (1 - spread,) * 2,
        (1 + spread,) * 2,
        *((1 - spread, 1 + spread),) * NUM_RANDOM_RUNS,
    ):
        scaled = [replace(one, run_s=one.run_s * generator.uniform(least, most)) for one in head]
        ends = [replace(one, at_s=now_s + (one.at_s - now_s) * generator.uniform(least, most)) for one in releases]
        runs.append(simulate_queue(scaled, free, ends, objective, now_s, patience_s))
    found: dict[str, StartForecast] = {}
    ahead = _jobs_ahead(order.jobs, every)
    for place, job in enumerate(order.jobs, start=1):
        starts = [run.get(job, math.inf) for run in runs]
        found[job] = StartForecast(
            place=place,
            ahead=ahead[job],
            start_s=starts[0],
            earliest_s=min(starts),
            latest_s=max(starts),
        )
    return found


def _jobs_ahead(jobs: Sequence[str], jobs_by_id: Mapping[str, WaitingJob]) -> dict[str, tuple[str, ...]]:
    """Return for each of `jobs`, given in order, the first `MAX_JOBS_AHEAD` before it that share a queue."""
    found: dict[str, tuple[str, ...]] = {}
    firsts: dict[PoolResource, dict[str, int]] = {}
    for place, job in enumerate(jobs):
        before: dict[str, int] = {}
        for queue in jobs_by_id[job].needs:
            first = firsts.setdefault(queue, {})
            before |= first
            if len(first) < MAX_JOBS_AHEAD:
                first[job] = place
        found[job] = tuple(sorted(before, key=before.__getitem__)[:MAX_JOBS_AHEAD])
    return found


def simulate_queue(
    waiting: Sequence[WaitingJob],
    free: Mapping[PoolResource, int],
    releases: Sequence[Release],
    objective: Objective,
    now_s: float,
    patience_s: float = math.inf,
) -> dict[str, float]:
    """Return the start of each job if all durations are as given."""
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
                node_limit=SEARCH_NODES,
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
