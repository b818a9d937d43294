"""Searched schedules beside named ones in the simulator, beside exact solutions, and the seconds of a search."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence

from benchmarks.table import Row
from isthmus.core.plan import StageTime
from isthmus.schedule import (
    Hop,
    PipelineCosts,
    Schedule,
    StageCosts,
    check_schedule,
    interleaved,
    one_f_one_b,
    overlapped,
    search_schedule,
    warm_up_counts,
    zero_bubble,
)
from isthmus.sim import SimulatedLink, run_pipeline

SITES = (2, 3, 4)
STAGES_PER_SITE = (1, 2, 4)
DELAYS = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Delay of a message between sites, in forwards."""
MICRO_BATCHES_PER_STAGE = (2, 4)
EXACT_STATES = 50_000
EXACT_CASES, QUICK_CASES = 40, 8


def measure(quick: bool) -> list[Row]:
    """Return the rows."""
    return [*_named_rows(quick), *_exact_rows(QUICK_CASES if quick else EXACT_CASES), _seconds_row()]


def _sites_pipeline(sites: int, per_site: int, delay_s: float, room: Sequence[int]) -> PipelineCosts:
    """Return equal stages whose forward, input and weight gradient take 1 s each, `per_site` stages at each site."""
    stages = tuple(
        StageCosts(forward_s=1, backward_input_s=1, backward_weight_s=1, max_in_flight=count) for count in room
    )
    hops = {}
    for stage in range(per_site - 1, sites * per_site - 1, per_site):
        hops[stage, stage + 1] = hops[stage + 1, stage] = Hop(delay_s=delay_s)
    return PipelineCosts(stages=stages, hops=hops)


def _named(costs: PipelineCosts, micro_batches: int) -> Iterator[Schedule]:
    """Yield the named schedules; overlapped with the warm-up that fits the memory best."""
    count = costs.num_stages
    yield one_f_one_b(count, micro_batches)
    yield zero_bubble(count, micro_batches)
    hops_s = [costs.hop(s, s + 1).total_s for s in range(count - 1)]
    limits = [one.max_in_flight for one in costs.stages]
    warm_up = warm_up_counts([one.pass_s for one in costs.stages], hops_s, micro_batches, limits)
    yield overlapped(count, micro_batches, warm_up)
    yield interleaved(count, micro_batches, 2)


def _simulated_s(schedule: Schedule, costs: PipelineCosts) -> float:
    times = [
        StageTime(forward_s=one.forward_s, backward_s=one.backward_input_s + one.backward_weight_s)
        for one in costs.stages
    ]
    links = {
        ends: SimulatedLink(name=f"{ends}", bytes_per_s=1e18, delay_s=hop.delay_s) for ends, hop in costs.hops.items()
    }
    if schedule.num_chunks > 1 and costs.num_stages > 2:  # chunks return from the last site to the first
        last = costs.num_stages - 1
        longest_s = max(hop.delay_s for hop in costs.hops.values())
        for ends in ((last, 0), (0, last)):
            links[ends] = SimulatedLink(name=f"{ends}", bytes_per_s=1e18, delay_s=longest_s)
    return run_pipeline(schedule, times, links, 1.0).step_s


def _named_rows(quick: bool) -> list[Row]:
    """Return the time saved over each named schedule, at 1F1B's peak memory and at 1F1B's memory of each stage."""
    saved: dict[str, list[float]] = {}
    fitting: dict[str, int] = {}
    of_each: list[float] = []
    by_stages: dict[int, list[float]] = {}
    slower = proven = 0
    grid = itertools.product(SITES, STAGES_PER_SITE, DELAYS, MICRO_BATCHES_PER_STAGE[: 1 if quick else None])
    cases = list(grid)
    for sites, per_site, delay_s, times in cases:
        count = sites * per_site
        costs = _sites_pipeline(sites, per_site, delay_s, [count] * count)
        found = search_schedule(costs, times * count)
        check_schedule(found.schedule)
        ours_s = _simulated_s(found.schedule, costs)
        proven += found.is_optimal
        for schedule in _named(costs, times * count):
            named_s = _simulated_s(schedule, costs)
            saved.setdefault(schedule.name, []).append(100 * (1 - ours_s / named_s))
            fits = max(check_schedule(schedule)) <= count * schedule.num_chunks
            fitting[schedule.name] = fitting.get(schedule.name, 0) + fits
            slower += fits and ours_s > named_s * (1 + 1e-9)
        by_stages.setdefault(per_site, []).append(saved["1f1b"][-1])
        own = _sites_pipeline(sites, per_site, delay_s, [count - s for s in range(count)])
        ours_s = _simulated_s(search_schedule(own, times * count).schedule, own)
        of_each.append(100 * (1 - ours_s / _simulated_s(one_f_one_b(count, times * count), own)))
    head = f"schedule search, {len(cases)} pipelines over 2 to 4 sites"
    rows = [
        Row(what=f"{head}: slower than a named one of as much memory", ours=slower, unit="pipelines",
            target="0", met=slower == 0)
    ]  # fmt: skip
    for name, each in saved.items():
        median = statistics.median(each)
        goal = {"target": "at least 25", "met": median >= 25} if name == "1f1b" else {}
        what = f"{head}: less time than {name}, median ({fitting[name]} of them in 1F1B's peak memory)"
        rows.append(Row(what=what, ours=median, unit="%", **goal))
    for per_site, each in by_stages.items():
        what = f"{head}: less time than 1f1b, median of the {len(each)} with {per_site} stages a site"
        rows.append(Row(what=what, ours=statistics.median(each), unit="%"))
    rows.append(Row(what=f"{head}: proven the fastest within the memory", ours=proven, unit="pipelines"))
    what = f"{head}: less time than 1f1b, median, each stage with 1F1B's own memory"
    return [*rows, Row(what=what, ours=statistics.median(of_each), unit="%")]


def _random_pipeline(draw: random.Random) -> tuple[PipelineCosts, int]:
    """Return a pipeline of up to 4 unlike stages, and its micro-batches, up to 8."""
    count = draw.randint(2, 4)
    stages = tuple(
        StageCosts(
            forward_s=draw.uniform(0.5, 1.5),
            backward_input_s=draw.uniform(0.5, 1.5),
            backward_weight_s=draw.uniform(0.5, 1.5),
            max_in_flight=count,
        )
        for _ in range(count)
    )
    hops = {}
    for stage in range(count - 1):
        hop = Hop(delay_s=draw.choice([0.0, *DELAYS]), transfer_s=draw.choice([0.0, 0.3, 0.8]))
        hops[stage, stage + 1] = hops[stage + 1, stage] = hop
    return PipelineCosts(stages=stages, hops=hops), draw.randint(count, 8)


def _exact_rows(num_cases: int) -> list[Row]:
    """Return how far searches are above exact solutions, where the exact solver proved its own."""
    searched, greedy, proven = [0.0], [0.0], 0
    for seed in range(num_cases):
        costs, micro_batches = _random_pipeline(random.Random(f"schedules {seed}"))
        exact = search_schedule(costs, micro_batches, max_states=EXACT_STATES)
        if not exact.is_optimal:
            continue
        proven += 1
        searched.append(100 * (search_schedule(costs, micro_batches).step_s / exact.step_s - 1))
        greedy.append(100 * (search_schedule(costs, micro_batches, max_states=0).step_s / exact.step_s - 1))
    head = f"schedule search, {proven} of {num_cases} pipelines of up to 4 unlike stages x 8 micro-batches proven"
    return [
        Row(what=f"{head}: above the exact solution, worst", ours=max(searched), unit="%", target="at most 1",
            met=max(searched) <= 1 and proven > num_cases // 2),
        Row(what=f"{head}: without enumeration, above it, worst", ours=max(greedy), unit="%"),
    ]  # fmt: skip


def _seconds_row() -> Row:
    """Return the CPU seconds of a large search, the best of 3."""
    costs = _sites_pipeline(4, 4, 5.0, [16] * 16)
    seconds = []
    for _ in range(3):
        start_s = time.process_time()
        search_schedule(costs, 128)
        seconds.append(time.process_time() - start_s)
    return Row(
        what="schedule search, 16 stages x 128 micro-batches", ours=min(seconds), unit="CPU s", target="at most 1",
        met=min(seconds) <= 1,
    )  # fmt: skip
