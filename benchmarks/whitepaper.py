"""The report's twelve tasks on virtual chips: `python -m benchmarks.whitepaper [--scale S] [--quick]`.

The workers of a job with `compute: virtual` run the tasks of the cross-domain pooling report, 5.2: schedule,
executor, communicator and transport are those of training, and real tensors cross emulated links. A stage is one
process whatever its degrees: computing and communication of its chips inside the cluster take the time of the
planner's time model, calibrated on tasks 1 and 3 alone (`benchmarks._tasks`), and so does the reduction of
gradients between replicas that share a cluster. Times and rates are those of the tasks divided by S (16), and
bytes therefore by S²; the rows give full size. Each iteration stands beside the simulator's of the same plan,
and beside the published one where the report has it. A step counts unless waiting, in place of computing, took
1 % of it too long at some stage. Efficiency is the TGS over that of the same job in one cluster (tasks 1 and 9).
Task 2 waits in its queue, in the report as here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from benchmarks._real_pipeline import Routes, emulated
from benchmarks._tasks import FIBRE_MS, OTHERS, TASK_1, TASK_3, WITH_OTHERS, Task, calibrate, task_11
from benchmarks._tasks_scaled import OTHERS_SHARE, SCALES, pool_at, scaled
from benchmarks._tasks_tables import Result, page, rows
from benchmarks._virtual_run import interference, rehearse
from benchmarks.table import print_rows, printed_at
from isthmus.core.pool import Pool
from isthmus.plan import predict
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.plan_links import simulated_links
from isthmus.sim import Interference

DELAYS_MS = (25.0, 50.0)
"""One way, beside the 10 ms of the report's fibre."""

LONG_BATCH = 64
"""Tasks of more samples than this run one step that counts, others two."""

ATTEMPTS = 3
"""How often a task is run at most until one of its steps counts."""


class Bench:
    """Runs tasks at one scale; a context manager that keeps the emulated links of each delay."""

    def __init__(self, calibration: Calibration, scale: int) -> None:
        self.calibration, self.scale = calibration, scale
        self._links: dict[float, Routes] = {}
        self._open = ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def run(self, task: Task, delay_ms: float = FIBRE_MS) -> Result:
        """Rehearse `task` over links of `delay_ms` one way."""
        print(f"{task.name}, {delay_ms:g} ms ...", file=sys.stderr, flush=True)
        small = scaled(task, self.calibration, delay_ms, self.scale)
        steps = 1 if task.batch > LONG_BATCH else 2
        with tempfile.TemporaryDirectory() as folder, self._others(task, small.pool, delay_ms):
            routes, model = self._routes(small.pool, delay_ms), model_file(Path(folder), sum(task.layers))
            for attempt in range(ATTEMPTS):
                run = rehearse(small.plan, small.times, model, Path(folder) / str(attempt), routes, steps)
                if run.num_calm:
                    break
        forecast = predict(
            small.whole, pool_at(delay_ms), task.profile, self.calibration,
            interference=self._interference(task, delay_ms),
        )  # fmt: skip
        seconds = run.step_s * self.scale
        return Result(task=task, delay_ms=delay_ms, forecast=forecast, iteration_s=seconds, rehearsed=run)

    def _routes(self, small: Pool, delay_ms: float) -> Routes:
        if delay_ms not in self._links:
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))
            self._links[delay_ms] = self._open.enter_context(emulated(small, folder))
        return self._links[delay_ms]

    @contextmanager
    def _others(self, task: Task, small: Pool, delay_ms: float) -> Iterator[None]:
        """Let others send over the task's link, or over another one like it, while the task runs."""
        routes = self._routes(small, delay_ms)
        a, b = ("cluster1", "cluster3") if task.others == "shared" else ("others-a", "others-b")
        link = small.link("cluster1", "cluster3")
        rate = OTHERS_SHARE * link.bandwidth_bytes_per_s if link else 0.0
        sending = task.others != "none"
        with interference((routes[a][b], routes[b][a]), rate) if sending else nullcontext():
            yield

    def _interference(self, task: Task, delay_ms: float) -> dict[tuple[str, str], Interference]:
        if task.others != "shared":
            return {}
        wires = simulated_links(task.plan, pool_at(delay_ms), self.calibration)
        return {ends: Interference(bytes_per_s=OTHERS_SHARE * wire.bytes_per_s) for ends, wire in wires.items()}


def model_file(folder: Path, layers: int) -> Path:
    """Write what a rehearsal needs of Mixtral 8x7B with another number of layers."""
    file = folder / "config.json"
    sizes = {"num_hidden_layers": layers, "hidden_size": 4096, "vocab_size": 32000}
    file.write_text(json.dumps({"architectures": ["MixtralForCausalLM"], **sizes}), encoding="utf-8")
    return file


def tasks(calibration: Calibration, quick: bool) -> list[Task]:
    """Return the tasks that run, in the report's order; task 7 is task 3 once more."""
    if quick:
        return [TASK_1, next(task for task in OTHERS if task.name == "task 8")]
    found = [TASK_1, TASK_3, *WITH_OTHERS, *OTHERS, task_11(calibration)]
    return sorted(found, key=lambda task: (float(task.name.strip("task b")), task.name))


def run_tasks(bench: Bench, chosen: Sequence[Task]) -> list[Result]:
    """Run every task once, and take for task 7 what task 3 took."""
    done: dict[str, Result] = {}
    for task in chosen:
        if task.name == "task 7":
            done[task.name] = replace(done["task 3"], task=task)
        else:
            done[task.name] = bench.run(task)
    return list(done.values())


def by_delay(bench: Bench, results: Sequence[Result]) -> list[Result]:
    """Return tasks 3 and 8 at all delays, those that were run already among them."""
    known = [one for one in results if one.task.name in ("task 3", "task 8")]
    more = [bench.run(one.task, delay_ms) for delay_ms in DELAYS_MS for one in known]
    return [*known, *more]


def main() -> int:
    """Run the tasks and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, choices=SCALES, default=16, help="how many times as quick")
    parser.add_argument("--quick", action="store_true", help="tasks 1 and 8 alone, 32 times as quick")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    calibration = calibrate()
    with Bench(calibration, 32 if args.quick else args.scale) as bench:
        results = run_tasks(bench, tasks(calibration, args.quick))
        delays = [] if args.quick else by_delay(bench, results)
    if args.json:
        print_rows(list(rows(results, delays)), as_json=True)
    else:
        print(f"{page(results, delays)}\n\n{printed_at()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
