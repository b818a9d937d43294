"""`generate_trace`: a seeded random trace with the statistics of published ones.

Arrivals are a Poisson process with a daily cycle, gang sizes are powers of two with a heavy tail, run times
are lognormal. As in the traces of Acme and Helios, most jobs are small and short and a few large ones take
most chip hours (Hu et al., NSDI 2024 and SC 2021).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from isthmus.control.simulation.traces.job_trace import Trace, TraceJob
from isthmus.core.priority import Priority

DAY_S = 86_400.0
DAILY_SWING = 0.6
"""Amplitude of the arrival rate's daily cycle, relative to its mean."""

MEDIAN_RUN_S, RUN_SIGMA = 1_800.0, 1.2
PRIORITY_WEIGHTS: Mapping[Priority, float] = {"low": 0.2, "middle": 0.7, "high": 0.1}


def generate_trace(
    chips: Mapping[str, int], *, seed: int, num_jobs: int, load: float = 0.8, chips_per_worker: int = 8
) -> Trace:
    """Return a trace of `num_jobs` jobs with offered load `load`, a fraction of all `chips` (by owner).

    Owners submit in proportion to their chips; no gang is larger than half of all chips. The same seed gives
    the same trace.
    """
    rng = random.Random(seed)  # noqa: S311 - seeded, so that runs repeat; no secret
    total = sum(chips.values())
    sizes = _gang_size_weights(max(1, total // 2 // chips_per_worker))
    mean_run_s = MEDIAN_RUN_S * math.exp(RUN_SIGMA**2 / 2)
    mean_chips = chips_per_worker * sum(size * weight for size, weight in sizes.items()) / sum(sizes.values())
    rate = load * total / (mean_chips * mean_run_s)
    now_s, jobs = 0.0, []
    for number in range(num_jobs):
        now_s += _interarrival_s(rng, rate, now_s)
        jobs.append(
            TraceJob(
                name=f"job-{number:06d}",
                owner=rng.choices(list(chips), weights=list(chips.values()))[0],
                submit_s=now_s,
                run_s=max(10.0, rng.lognormvariate(math.log(MEDIAN_RUN_S), RUN_SIGMA)),
                workers=rng.choices(list(sizes), weights=list(sizes.values()))[0],
                chips_per_worker=chips_per_worker,
                priority=rng.choices(list(PRIORITY_WEIGHTS), weights=list(PRIORITY_WEIGHTS.values()))[0],
            )
        )
    return Trace(jobs=tuple(jobs))


def _gang_size_weights(max_workers: int) -> dict[int, float]:
    """Return the weight of each gang size: twice the size, half the frequency."""
    return {2**power: 0.5**power for power in range(max_workers.bit_length()) if 2**power <= max_workers}


def _interarrival_s(rng: random.Random, jobs_per_s: float, now_s: float) -> float:
    """Return the seconds to the next arrival, by thinning a Poisson process of the peak rate."""
    at_s = now_s
    while True:
        at_s += rng.expovariate(jobs_per_s * (1 + DAILY_SWING))
        if rng.random() * (1 + DAILY_SWING) <= 1 + DAILY_SWING * math.sin(2 * math.pi * at_s / DAY_S):
            return at_s - now_s
