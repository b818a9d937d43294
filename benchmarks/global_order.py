"""The one order of several owners' queues: CPU time with many waiting jobs, and the gap to the optimum.

`python -m benchmarks.global_order [--json] [--quick]`. Forty queues with random free chips, 300 running jobs
that return theirs, jobs of one to three parts of 1 to 64 chips, three priorities, deadlines for a third. The
gap is in chips in use (utilisation) or in started jobs (throughput), against the same search run to its end;
the band is that of `forecast_starts`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from dataclasses import replace

from benchmarks.table import Row, print_rows
from isthmus.control.algorithms.global_order import Objective, Release, WaitingJob, global_order
from isthmus.control.algorithms.knapsack import pack_jobs
from isthmus.control.algorithms.start_forecast import forecast_starts, simulate_queue
from isthmus.core.pool_resource import PoolResource

OBJECTIVES: tuple[Objective, ...] = ("arrival", "utilisation", "throughput", "deadline")
NOW_S = 20_000.0
NODES_TO_THE_END = 150_000


def instance(count: int, queues: int, seed: int) -> tuple[list[WaitingJob], dict[PoolResource, int], list[Release]]:
    """Return waiting jobs, free chips by queue, and what running jobs release."""
    chance = random.Random(seed)
    names = [PoolResource.chips(f"c{number}", "h20") for number in range(queues)]
    waiting = [
        WaitingJob(
            job=f"j{number}",
            needs={
                name: chance.choice((1, 2, 4, 8, 16, 64))
                for name in chance.sample(names, chance.choice((1, 1, 1, 2, 3)))
            },
            submitted_s=chance.uniform(0, NOW_S),
            priority=chance.choice(("low", "middle", "middle", "high")),
            deadline_s=chance.choice((None, None, NOW_S + chance.uniform(0, 1e5))),
            run_s=10 + chance.expovariate(1 / 1000),
        )
        for number in range(count)
    ]
    free = {name: chance.choice((0, 0, 0, 8, 64)) for name in names}
    releases = [
        Release(
            at_s=NOW_S + chance.expovariate(1 / 1000),
            chips={name: chance.choice((8, 16, 64, 128)) for name in chance.sample(names, 2)},
        )
        for _ in range(300)
    ]
    return waiting, free, releases


def cost_rows(count: int, runs: int, allowed_ms: float | None) -> list[Row]:
    """Return the CPU time of one order of `count` jobs by each objective, patience of an hour; the median."""
    found = []
    for objective in OBJECTIVES:
        took = []
        for seed in range(runs):
            waiting, free, releases = instance(count, 40, seed)
            start_s = time.process_time()
            global_order(waiting, free, objective, NOW_S, releases=releases, patience_s=18_000.0)
            took.append(1e3 * (time.process_time() - start_s))
        ours = statistics.median(took)
        target = f"at most {allowed_ms:g}" if allowed_ms else ""
        found.append(
            Row(what=f"order of {count:,} waiting jobs, {objective} (longest of {runs}: {max(took):.3g})",
                ours=ours, unit="CPU ms", target=target, met=ours <= allowed_ms if allowed_ms else None)
        )  # fmt: skip
    return found


def forecast_row(count: int) -> Row:
    """Return the CPU time of the expected starts of the head of the queue."""
    waiting, free, releases = instance(count, 40, 0)
    start_s = time.process_time()
    forecast_starts(waiting, free, releases, "arrival", NOW_S)
    ours = 1e3 * (time.process_time() - start_s)
    return Row(what=f"expected starts with {count:,} waiting, order included", ours=ours, unit="CPU ms")


def band_row(runs: int) -> Row:
    """Return how many starts lie in the band where every run is off by up to a fifth, by chance."""
    inside = []
    for seed in range(runs):
        chance = random.Random(seed)
        waiting, free, releases = instance(40, 5, seed)
        free, releases = dict.fromkeys(free, 0), releases[:12]
        releases += [Release(at_s=NOW_S + 60 * n, chips={name: 64}) for n, name in enumerate(free)]
        forecast = forecast_starts(waiting, free, releases, "arrival", NOW_S)
        truth = simulate_queue(
            [replace(one, run_s=one.run_s * chance.uniform(0.8, 1.2)) for one in waiting],
            free,
            [replace(one, at_s=NOW_S + (one.at_s - NOW_S) * chance.uniform(0.8, 1.2)) for one in releases],
            "arrival",
            NOW_S,
        )
        for job, start_s in truth.items():
            told = forecast[job]
            if start_s > NOW_S and math.isfinite(told.start_s):
                inside.append(told.earliest_s <= start_s <= told.latest_s)
    return Row(
        what=f"starts within their band, runs off by up to a fifth ({len(inside):,} jobs, {runs} queues)",
        ours=100 * statistics.fmean(inside), unit="%", target="at least 90",
        met=statistics.fmean(inside) >= 0.9,
    )  # fmt: skip


def gap_rows(runs: int) -> list[Row]:
    """Return how much less than the optimum starts, over instances whose optimum was proven."""
    found = []
    for objective in ("utilisation", "throughput"):
        gaps, proven = [], 0
        for seed in range(runs):
            waiting, free, _ = instance(40, 6, seed)
            free = {name: chips + 32 for name, chips in free.items()}
            values = [float(sum(one.needs.values())) if objective == "utilisation" else 1.0 for one in waiting]
            needs = [one.needs for one in waiting]
            best = pack_jobs(values, needs, free, NODES_TO_THE_END)
            if best.exact and best.value:
                proven += 1
                gaps.append(1 - pack_jobs(values, needs, free).value / best.value)
        found.append(
            Row(what=f"{objective}: mean gap to the optimum, 40 jobs, 6 queues ({proven} of {runs} proven; "
                f"{sum(gap == 0 for gap in gaps)} equal; the worst {100 * max(gaps, default=0):.3g} %)",
                ours=100 * statistics.fmean(gaps or [0.0]), unit="%")
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="fewer instances")
    options = parser.parse_args()
    found = cost_rows(10_000, 3 if options.quick else 15, 50.0)
    if not options.quick:
        found += cost_rows(100_000, 3, None)
    found.append(forecast_row(10_000))
    found.append(band_row(4 if options.quick else 30))
    found += gap_rows(5 if options.quick else 40)
    print_rows(found, options.json)


if __name__ == "__main__":
    main()
