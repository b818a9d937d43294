"""The ledger: seeded faults, a month of 100,000 jobs, records of two real Slurm clusters, the meter's share of CPU.

`runs`: seeded runs of a pool as in `pool_chaos`: servers and agents crash, sites are cut off, owners lie and change
prices, users cancel, preempt and delete jobs. At the end of each, all entries are summed, every amount is recounted
from price and time, and the usage is counted by other means from the log (`benchmarks/_ledger_recount.py`): what is
missing, booked twice, or booked with another amount. The ledger of the server, which crashed on the way, is compared
with one from the log alone.

`replay`: what the jobs of a month hold goes through the meter twice (`benchmarks/_ledger_month.py`): once from nothing,
once with the state stored and read back every day, as a server restarts. The ledgers must be equal to the byte.

`month`: a month of load at three owners through the real server and the real agents, with faults; each owner counts by
itself (`tests/control/owners_month.py`).

`slurm`: the ledger beside the records of two real Slurm clusters (`benchmarks/_ledger_slurm.py`).

`share`: the meter is timed in each event of logs of pools with faults, which are replayed
(`benchmarks/_meter_share.py`). A log has only what changes something, and every third event of it ends an interval: the
most that the meter can cost. The other row is its share of all that the coordinator does while jobs of hours run: it
takes the reports of sites, gives orders, and looks for what is due.

`submissions`: how many the server's service and coordinator take in a CPU second, beside rounds without the meter, by
turns (`benchmarks/_metered_submissions.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pydantic_core
from pydantic import TypeAdapter

from benchmarks import _ledger_slurm, _owners_month
from benchmarks._ledger_month import DAY_S, Act, month_of, tariffs_of
from benchmarks._ledger_recount import Recount, recount
from benchmarks._meter_share import MeterTime, meter_time, running_time
from benchmarks._metered_submissions import submission_rows
from benchmarks.table import Row, print_rows, run_parts
from isthmus.control.accounting.check_ledger import check_ledger
from isthmus.control.accounting.meter import Meter
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.simulation.chaos.run_chaos import CONFIG, run_chaos
from isthmus.control.simulation.simulated_server import MemoryLog
from isthmus.control.store.column_codec import column_codec
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.owner.tariff import Tariff

PARTS = ("runs", "replay", "month", "slurm", "share", "submissions")
RUNS, QUICK_RUNS, BATCH = 10_000, 20, 10
CHECK_EVERY = 16  # `pool_chaos` checks the other invariants after every event
JOBS, QUICK_JOBS = 100_000, 2_000
SHARE_SEEDS, QUICK_SHARE_SEEDS = range(16), range(4)
SHARE_JOBS, QUICK_SHARE_JOBS = 60, 5
SUBMITTED, QUICK_SUBMITTED = (3_000, 10_000, 9), (100, 500, 1)
"""Submissions one a request, and many a request, in each round; rounds."""
MAX_REPLAY_CPU_S, MAX_SHARE = 20.0, 0.03


@dataclass(kw_only=True)
class RunSums:
    """The results of some runs, summed. `sum` adds the absolute sums of entries, so that none hides another."""

    runs: int = 0
    entries: int = 0
    tariffs: int = 0
    deletions: int = 0
    crashes: int = 0
    sum: int = 0
    unpaired: int = 0
    differences: int = 0
    recount: Recount = field(default_factory=Recount)
    unlike_replay: int = 0
    # The first problem of each run with one.
    problems: list[str] = field(default_factory=list)

    def add(self, other: RunSums) -> None:
        """Add the sums of other runs."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def play(seeds: range) -> RunSums:
    """Play some seeds."""
    sums = RunSums()
    for seed in seeds:
        sums.add(_one_run(seed))
    return sums


def _one_run(seed: int) -> RunSums:
    log, last = MemoryLog(), list[Coordinator]()
    run = run_chaos(seed, log, at_end=last.append, check_every=CHECK_EVERY)
    meter, replayed = last[0].state.meter, Coordinator(CONFIG)
    found, counted = check_ledger(meter.ledger), recount(log.events(), meter.ledger, CONFIG, replayed)
    return RunSums(
        runs=1,
        entries=found.entries,
        tariffs=run.tariffs,
        deletions=run.deletions,
        crashes=sum(count for kind, count in run.fault_counts.items() if "dies" in kind),
        sum=abs(found.sum),
        unpaired=found.unpaired,
        differences=len(found.differences),
        recount=counted,
        unlike_replay=to_bytes(replayed.state.meter) != to_bytes(meter),
        problems=[f"seed {seed}: {run.problems[0]}"] if run.problems else [],
    )


def measure_runs(first: int, runs: int, kept: Path | None = None) -> list[Row]:
    """Play `runs` seeds from `first` on, on every core; return what the ledgers came to.

    With a file `kept` the sums so far are written there, and a later call goes on from them.
    """
    sums = RunSums() if kept is None or not kept.exists() else TypeAdapter(RunSums).validate_json(kept.read_bytes())
    batches = [range(at, min(at + BATCH, first + runs)) for at in range(first + sums.runs, first + runs, BATCH)]
    with ProcessPoolExecutor(os.cpu_count()) as workers:
        for some in workers.map(play, batches):
            sums.add(some)
            for problem in some.problems:
                print(problem, file=sys.stderr, flush=True)
            if kept is not None:
                write_atomically(kept, pydantic_core.to_json(sums).decode())
            print(f"\r{sums.runs:,} of {runs:,} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    what = f"{sums.runs:,} seeded runs"
    counts = (
        (f"{what}: sum of all entries", sums.sum, "millionths"),
        (f"{what}: intervals that the ledger lacks", sums.recount.lost, "intervals"),
        (f"{what}: intervals booked twice", sums.recount.doubled, "intervals"),
        (f"{what}: intervals with another amount or price than was held", sums.recount.wrong, "intervals"),
        (f"{what}: entries without a pair, balances and amounts that differ", sums.unpaired + sums.differences, ""),
        (f"{what}: ledgers that differ from one of the log alone", sums.unlike_replay, "runs"),
        (f"{what}: with another problem", len(sums.problems), "runs"),
    )
    struck = (("entries", sums.entries), ("tariffs published", sums.tariffs), ("jobs deleted", sums.deletions),
              ("crashes of servers and agents", sums.crashes))  # fmt: skip
    return [
        *(Row(what=text, ours=float(count), unit=unit, target="0", met=not count) for text, count, unit in counts),
        *(Row(what=text, ours=float(count), unit="", target="some", met=count > 0) for text, count in struck),
    ]


def fold(acts: Sequence[Act], tariffs: Sequence[tuple[float, Tariff]], *, restarts: bool) -> Meter:
    """Return the meter after all acts; with `restarts` its state is stored and read back every day."""
    meter, published, next_restart_s = Meter(), 0, DAY_S
    for act in acts:
        while published < len(tariffs) and tariffs[published][0] <= act.at_s:
            meter.advance(tariffs[published][0])
            meter.publish(tariffs[published][1])
            published += 1
        if restarts and act.at_s >= next_restart_s:
            meter, next_restart_s = from_bytes(to_bytes(meter)), next_restart_s + DAY_S
        meter.advance(act.at_s)
        if act.saved:
            meter.note_checkpoint(act.job, act.holdings[0].attempt)
        if act.lost_by:
            meter.lose(act.job, act.holdings[0].attempt, act.lost_by)
        meter.observe(act.job, act.user, "middle", act.holdings)
        if act.ended:
            meter.end(act.job)
    return meter


def to_bytes(meter: Meter) -> bytes:
    """Return the meter as a snapshot stores it."""
    return pydantic_core.to_json(column_codec(Meter).encode([meter]))


def from_bytes(body: bytes) -> Meter:
    """Return a stored meter."""
    (found,) = column_codec(Meter).decode(pydantic_core.from_json(body), 1)
    meter: Meter = found
    return meter


def measure_replay(jobs: int, seed: int) -> list[Row]:
    """Fold a month with and without restarts, and check the ledger."""
    acts, tariffs = month_of(jobs, seed), list(tariffs_of(seed))
    began_s = time.process_time()
    meter = fold(acts, tariffs, restarts=False)
    cpu_s = time.process_time() - began_s
    unlike = to_bytes(meter) != to_bytes(fold(acts, tariffs, restarts=True))
    check = check_ledger(meter.ledger)
    what, limit_s = f"a month of {jobs:,} jobs", MAX_REPLAY_CPU_S * jobs / JOBS
    odd = check.unpaired + len(check.differences)
    return [
        Row(what=f"{what}: ledger from nothing, {check.entries:,} entries", ours=cpu_s, unit="CPU s",
            target=f"at most {limit_s:g}", met=cpu_s <= limit_s),
        Row(what=f"{what}: ledgers that differ in a byte from one with a restart every day", ours=float(unlike),
            unit="", target="0", met=not unlike),
        Row(what=f"{what}: sum of all entries", ours=float(check.sum), unit="millionths", target="0",
            met=not check.sum),
        Row(what=f"{what}: entries without a pair, balances and amounts that differ", ours=float(odd), unit="",
            target="0", met=not odd),
    ]  # fmt: skip


def measure_share(seeds: Sequence[int], num_jobs: int) -> list[Row]:
    """Replay the logs of pools with faults, and let one run `num_jobs` jobs of hours; see `_meter_share`."""
    times: list[MeterTime] = []
    num_bookings = 0
    for seed in seeds:
        log, last = MemoryLog(), list[Coordinator]()
        run_chaos(seed, log, at_end=last.append, check_every=CHECK_EVERY)
        times.append(meter_time(log.stored, CONFIG))
        num_bookings += len(last[0].state.meter.ledger.transactions)
    whole = MeterTime(*(sum(column) for column in zip(*times, strict=True)))
    what = f"{whole.events:,} events of {len(seeds)} pools with faults"
    running, days = running_time(num_jobs, 0)
    ran = f"{days:.1f} days of a pool with {num_jobs} jobs of hours, reports without a change included"
    return [
        Row(what=f"the meter's share of the coordinator's time, {ran}", ours=100 * running.share, unit="%",
            target=f"at most {100 * MAX_SHARE:g}", met=running.share <= MAX_SHARE),
        Row(what=f"the meter's share of handling a log, {what}", ours=100 * whole.share, unit="%",
            target=f"at most {100 * MAX_SHARE:g}", met=whole.share <= MAX_SHARE),
        Row(what=f"the meter, {what}, {num_bookings / whole.events:.2f} bookings each",
            ours=whole.meter_ns / whole.events / 1000, unit="us an event"),
    ]  # fmt: skip


def main() -> int:
    """Measure the chosen parts and print the rows; the exit status tells whether all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", action="append", choices=PARTS, help="one part")
    parser.add_argument("--runs", type=int, default=None, help=f"seeds to play (default {RUNS})")
    parser.add_argument("--jobs", type=int, default=None, help=f"jobs of the month (default {JOBS})")
    parser.add_argument("--keep", type=Path, help="a file of the sums of seeded runs so far, to go on from")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RUNS} runs, {QUICK_JOBS} jobs and few pools")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    num_runs = options.runs or (QUICK_RUNS if options.quick else RUNS)
    parts = {
        "runs": lambda: measure_runs(options.seed, num_runs, options.keep),
        "replay": lambda: measure_replay(options.jobs or (QUICK_JOBS if options.quick else JOBS), options.seed),
        "month": lambda: _owners_month.rows(options.seed, quick=options.quick),
        "slurm": lambda: _ledger_slurm.rows(
            _ledger_slurm.QUICK if options.quick else _ledger_slurm.SlurmAmount(), options.seed
        ),
        "share": lambda: measure_share(
            *((QUICK_SHARE_SEEDS, QUICK_SHARE_JOBS) if options.quick else (SHARE_SEEDS, SHARE_JOBS))
        ),
        "submissions": lambda: list(submission_rows(*(QUICK_SUBMITTED if options.quick else SUBMITTED))),
    }
    rows = run_parts(parts, options.only or tuple(parts))
    print_rows(rows, options.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
