"""What a fault costs: a worker killed, a link cut, and any number of faults by seed, each in its own run.

Three stages of a tiny model train in two clusters joined by a proxy, each under a supervisor. `detected` is the
time until the first rank reports the fault, `resumed` the time until all ranks train on (after a cut: from the
return of the line), `lost` the number of repeated steps. A run with a fault must end with the losses of the
undisturbed run, bit by bit. A killed supervisor has no replacement: that run must end with the reason, and the
next attempt with those losses. Options: `--quick` (a short cut, ten seeds), `--runs N` faults from `--seed S` on,
`--only SEED...` (these faults and nothing else), `--transport process` (odd seeds hit the process of a rank's
transport), `--json`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._fault_kinds import STEPS, Fault, outcome
from benchmarks._fault_run import RANKS, FaultRun, below, run_of, small_job
from benchmarks.table import Row, print_rows
from isthmus.core.job import Job

DETECTED_S, RESUMED_S, LOST_STEPS = 1.0, 5.0, 1
KILLS = 6
CUT_S, QUICK_CUT_S = 30.0, 3.0
RUNS, QUICK_RUNS = 200, 10
_LONG = 4000
"""Steps of a run that is disturbed in its midst and then ended."""


def kills(job: Job, folder: Path, undisturbed: dict[int, float], count: int) -> list[Row]:
    """Kill each rank's process in turn, `count` times in all; the worst of each figure."""
    detected, resumed, lost, same = list[float](), list[float](), list[float](), True
    for number in range(count):
        with run_of(folder / f"kill-{number}", below(job, folder / f"kill-{number}")) as run:
            run.wait_for_step(3)
            pid, killed_s = run.worker(number % RANKS), time.time()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            same = run.end() == [0] * RANKS and run.losses() == undisturbed and same
            detected.append(_first(run, "lost", killed_s))
            resumed.append(_last(run, "resumed", killed_s))
            lost.append(max(run.values("repeated_steps"), default=0.0))
    return _rows(f"kill -9 of a worker, {count} times, the worst", detected, resumed, lost, same)


def cut(job: Job, folder: Path, cut_s: float) -> list[Row]:
    """Let nothing through between the clusters for `cut_s`, once."""
    long = job.model_copy(update={"training": job.training.model_copy(update={"steps": _LONG})})
    with run_of(folder / "cut", below(long, folder / "cut")) as run:
        run.wait_for_step(3)
        pids, cut_at_s = [run.worker(rank) for rank in range(RANKS)], time.time()
        run.relay.flowing.clear()
        time.sleep(cut_s)
        done, back_s = run.steps_done(), time.time()
        run.relay.flowing.set()
        run.wait_for_step(done + 1)
        resumed_s, first = time.time() - back_s, run.losses()
        stayed = pids == [run.worker(rank) for rank in range(RANKS)]
        detected_s = _first(run, "cut", cut_at_s)
        repeated = sum(run.values("repeated_steps"))
    with run_of(folder / "uncut", below(long, folder / "uncut")) as run:
        run.wait_for_step(max(first) + 1)
        whole = run.losses()
    same = stayed and all(whole[step] == loss for step, loss in first.items())
    return _rows(f"a WAN cut of {cut_s:g} s", [detected_s], [resumed_s], [repeated], same)


def seeds(job: Job, folder: Path, undisturbed: dict[int, float], chosen: Sequence[int]) -> list[Row]:
    """Run faults by seed; report each on standard error, and what is wrong with any."""
    good = 0
    for seed in chosen:
        fault = Fault.of(seed)
        try:
            wrong = outcome(fault, job, folder / f"seed-{seed}", undisturbed)
        except (TimeoutError, ValueError) as error:
            wrong = str(error)
        good += not wrong
        print(f"{fault}: {wrong or 'as undisturbed'}", file=sys.stderr, flush=True)
    count = len(chosen)
    what = f"{count} faults by seed: share that ends as it must"
    return [Row(what=what, ours=good / count, unit="", target="1", met=good == count)]


def _rows(what: str, detected: list[float], resumed: list[float], lost: list[float], same: bool) -> list[Row]:
    figures = (
        ("detected", max(detected), "s", DETECTED_S),
        ("resumed", max(resumed), "s", RESUMED_S),
        ("lost", max(lost), "steps", LOST_STEPS),
    )
    rows = [
        Row(what=f"{what}: {name}", ours=value, unit=unit, target=f"at most {limit:g}", met=value <= limit)
        for name, value, unit, limit in figures
    ]
    return [
        *rows,
        Row(what=f"{what}: same losses, bit by bit", ours=float(same), unit="", target="1", met=same),
    ]


def _first(run: FaultRun, kind: str, since_s: float) -> float:
    """Return when an event of `kind` was first reported, in seconds since then; infinite where never."""
    return min(
        (e.time_s - since_s for e in run.events() if e.kind == kind and e.time_s >= since_s),
        default=float("inf"),
    )


def _last(run: FaultRun, kind: str, since_s: float) -> float:
    """Return when an event of `kind` was last reported, in seconds since then; infinite where never."""
    return max((e.time_s - since_s for e in run.events() if e.kind == kind), default=float("inf"))


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short cut, and ten seeds")
    parser.add_argument("--runs", type=int, help=f"faults by seed (default {RUNS})")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these faults, and nothing else")
    parser.add_argument("--transport", choices=("thread", "process"), default="thread")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    runs = options.runs if options.runs is not None else QUICK_RUNS if options.quick else RUNS
    chosen = options.only or range(options.seed, options.seed + runs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = small_job(folder, STEPS, options.transport)
        with run_of(folder / "undisturbed", below(job, folder / "undisturbed")) as run:
            run.end()
            undisturbed = run.losses()
        rows = []
        if not options.only:
            rows += kills(job, folder, undisturbed, RANKS if options.quick else KILLS)
            rows += cut(job, folder, QUICK_CUT_S if options.quick else CUT_S)
        rows += seeds(job, folder, undisturbed, chosen)
    print_rows(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
