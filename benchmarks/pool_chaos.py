"""Seeded runs of a pool in which processes crash, messages are lost and owners lie: what must still hold.

Each run has the server's coordinator and its log, three to five simulated owners and 70 jobs on a virtual
clock. Every tenth run uses the real SQLite store, torn where the server crashes between write and flush. The
invariants are checked after every event that the coordinator handles. For a seed that fails, the run prints the
kinds of fault that still make it fail when the others are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.table import Row, print_rows
from isthmus.control.simulation.chaos.run_chaos import ChaosRun, run_chaos
from isthmus.control.simulation.faults.fault_injector import FAULT_RATES
from isthmus.control.simulation.faults.torn_write_log import SqliteEventLog

RUNS, QUICK_RUNS = 10_000, 40
REAL_STORE_EVERY = 10
BATCH = 20
_MEMORY = Path("/dev/shm")
"""Where there is one, stores lie there: what is asked is whether they can be read, not how fast a disk is."""


def one_run(seed: int) -> ChaosRun:
    """Play one seed, on the real store if it is that one's turn."""
    if seed % REAL_STORE_EVERY:
        return run_chaos(seed)
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        log = SqliteEventLog(Path(folder))
        try:
            return run_chaos(seed, log)
        finally:
            log.close()


def batch(seeds: range) -> tuple[list[ChaosRun], float]:
    """Play some seeds; return them with the CPU seconds they took."""
    began_s = time.process_time()
    return [one_run(seed) for seed in seeds], time.process_time() - began_s


def needed(seed: int) -> list[str]:
    """Leave kinds of fault out, one after the other, as long as the seed fails; return those that remain."""
    kinds = dict(FAULT_RATES)
    for kind in FAULT_RATES:
        fewer = {name: rate for name, rate in kinds.items() if name != kind}
        if run_chaos(seed, rates=fewer).problems:
            kinds = fewer
    return sorted(kinds)


def told(run: ChaosRun) -> Iterator[str]:
    """Say what failed, how to see it again, and the faults of the shortest history found."""
    yield f"seed {run.seed} FAILED: {run.problems[0]}"
    yield f"  again: python -m benchmarks.pool_chaos --runs 1 --seed {run.seed}"
    left = needed(run.seed)
    short = run_chaos(run.seed, rates={kind: FAULT_RATES[kind] for kind in left})
    if short.problems:
        yield f"  fails still with only: {', '.join(left)}"
        yield f"  {short.problems[0]}"
        yield from (f"    {line}" for line in short.history[-20:])


def play(first: int, runs: int) -> tuple[list[ChaosRun], float]:
    """Play `runs` seeds from `first` on, on every core; say how it goes."""
    found: list[ChaosRun] = []
    cpu_s, began_s, said_s = 0.0, time.perf_counter(), time.perf_counter()
    seeds = [range(at, min(at + BATCH, first + runs)) for at in range(first, first + runs, BATCH)]
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for some, took_s in workers.map(batch, seeds):
            found += some
            cpu_s += took_s
            for run in some:
                for line in told(run) if run.problems else ():
                    print(line, file=sys.stderr, flush=True)
            if time.perf_counter() - said_s > 10:
                said_s = time.perf_counter()
                spent_s = said_s - began_s
                print(f"{len(found)} of {runs} runs, {spent_s:.0f} s", file=sys.stderr, flush=True)
    return found, cpu_s


def rows(found: list[ChaosRun], cpu_s: float, wall_s: float) -> Iterator[Row]:
    """Return what all runs came to, and how often each kind of fault struck."""
    failed = [run for run in found if run.problems]
    yield Row(
        what=f"{len(found)} runs with a problem: a job lost or doubled, an invariant broken, a card kept",
        ours=len(failed),
        unit="runs",
        target="0",
        met=not failed,
    )
    leak_s = max(run.longest_leak_s for run in found)
    yield Row(
        what="longest that a card was kept for an unwanted part",
        ours=leak_s,
        unit="s of virtual time",
        target="at most 60",
        met=leak_s <= 60,
    )
    for what, values, least in (
        ("owners of a run, at least", [run.owners for run in found], 3),
        ("jobs of a run, all acknowledged, at least", [run.acknowledged for run in found], 50),
        ("events taken in by the coordinator in a run, at least", [run.events for run in found], 500),
    ):
        yield Row(what=what, ours=min(values), unit="", target=f"at least {least}", met=min(values) >= least)
    agreed = sum(run.preemptions for run in found)
    yield Row(what="joint preemptions begun", ours=agreed, unit="times", target="some", met=agreed > 0)
    yield Row(what="CPU of a run", ours=1e3 * cpu_s / len(found), unit="ms")
    yield Row(what="all runs", ours=cpu_s, unit="CPU s")
    yield Row(what="all runs", ours=wall_s, unit="wall s")
    struck = sum((run.fault_counts for run in found), Counter[str]())
    for kind in FAULT_RATES:
        yield Row(what=f"struck: {kind}", ours=struck[kind], unit="times", target="some", met=struck[kind] > 0)


def main() -> int:
    """Play the runs and print the rows; the exit status tells whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=None, help=f"seeds to play (default {RUNS})")
    parser.add_argument("--seed", type=int, default=0, help="the first of them")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_RUNS} seeds")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    runs = options.runs or (QUICK_RUNS if options.quick else RUNS)
    began_s = time.perf_counter()
    found, cpu_s = play(options.seed, runs)
    print_rows(list(rows(found, cpu_s, time.perf_counter() - began_s)), options.json)
    return 1 if any(run.problems for run in found) else 0


if __name__ == "__main__":
    sys.exit(main())
