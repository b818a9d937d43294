"""The demo, measured: its steps beside the planner's prediction, and beside the same plan without its links;
and real pipelines of its kind, predicted from micro-benchmarks alone.

The demo's prediction uses the pool file and the model only: the stage times are those of virtual chips (real
computing is padded to them), and the links are those that `benchmarks.wan_links` checks.

The real pipelines compute as fast as two cores do, one stage on each, with one torch thread. Their prediction
comes from `isthmus calibrate --measure`: parts of the model timed alone, two copies at once (both cores are busy,
as in the run), and the emulated links between the benchmark's own workers. Nothing is fitted to a run. Each
repetition measures, predicts, and lets the pipelines run until enough steps were calm. A step is disturbed, and
does not count, if foreign processes kept more than a tenth of a core busy during it, according to /proc; this
rule uses no times of the run. The workers stop while such processes run, and the steps of that time do not count
either. A repetition without enough calm steps is repeated. Other load hardly changes the processor time of a
step, so this figure is compared for calm and disturbed steps alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks._real_pipeline import DISTURBED, FAR, Case, Far, Pipeline, emulated, pool, spread
from benchmarks.table import Row, compared, print_rows
from isthmus.core.messages.worker_folder import write_atomically
from isthmus.core.model import load_model
from isthmus.core.plan import StageTime
from isthmus.plan import Calibration, load_calibration, predict, profile_model
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.replica_schedules import replica_schedule
from isthmus.plan.time.stage_costs import stage_costs
from isthmus.sim import Replica, SimulatedTraining, SimulationResult, simulate_training
from isthmus.wan.emulator import ROUTES_FILE

STEPS, QUICK_STEPS = 40, 12
REPETITIONS, QUICK_REPETITIONS = 5, 1
CALM_STEPS, FEWEST_CALM_STEPS, MOST_STEPS = 8, 4, 2000
"""Steps that a repetition waits for, without which it does not count, and that a run has."""
PROCESSOR_STEPS = 8
MINUTES, QUICK_MINUTES = 40.0, 4.0
"""How long calm is waited for, altogether."""

CASES = (
    Case(
        name="4 layers of 512, 256 tokens",
        hidden_size=512,
        intermediate_size=1024,
        num_layers=4,
        vocab_size=260,
        micro_batch_size=1,
        sequence_length=256,
        micro_batches=4,
    ),
    Case(
        name="6 layers of 384, vocabulary 8192, 2 x 128 tokens",
        hidden_size=384,
        intermediate_size=1152,
        num_layers=6,
        vocab_size=8192,
        micro_batch_size=2,
        sequence_length=128,
        micro_batches=4,
    ),
    Case(
        name="virtual chips of 10 and 20 ms, 4 layers of 256, 128 tokens",
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        vocab_size=260,
        micro_batch_size=1,
        sequence_length=128,
        micro_batches=16,
        pace=StageTime(forward_s=0.01, backward_s=0.02),
    ),
)


@dataclass(frozen=True)
class Pair:
    """One repetition: the step as predicted, and the calm ones as measured; its processor time likewise."""

    predicted_s: float
    predicted_busy_s: float
    processor_s: float
    calm_s: tuple[float, ...]
    disturbed: int

    @property
    def busy_error(self) -> float:
        """Predicted over measured processor time, less one."""
        return self.predicted_busy_s / self.processor_s - 1

    @property
    def counts(self) -> bool:
        """Whether enough steps were calm."""
        return len(self.calm_s) >= FEWEST_CALM_STEPS

    @property
    def measured_s(self) -> float:
        """The median of the calm steps."""
        return statistics.median(self.calm_s)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


Pairs = dict[tuple[Case, Far], list[Pair]]
"""All repetitions, those without enough calm steps too."""


def measured_pairs(folder: Path, repetitions: int, limit_s: float) -> Pairs:
    """Return the repetitions of every case and distance; none begins after `limit_s`.

    Each measures the parts and the links again, and runs the pipelines in turn.
    """
    end_s = time.monotonic() + limit_s
    write_atomically(folder / "pool.json", pool().model_dump_json(by_alias=True))
    jobs = {case: case.job(folder / f"model-{number}", MOST_STEPS) for number, case in enumerate(CASES)}
    pairs: Pairs = {(case, far): [] for case in CASES for far in FAR}
    with ExitStack() as stack:
        routes = stack.enter_context(emulated(pool(), folder))
        pipelines = {
            (case, far): stack.enter_context(
                Pipeline(jobs[case], case.plan(far), folder / f"run-{number}", routes, case.pace and [case.pace] * 2)
            )
            for number, (case, far) in enumerate(pairs)
        }
        while missing := [key for key, found in pairs.items() if _counted(found) < repetitions]:
            if time.monotonic() > end_s:
                break
            cases = dict.fromkeys(case for case, _ in missing)
            calibrations = {case: _calibration(case, jobs[case].model, folder) for case in cases}
            for case, far in missing:
                predicted = forecast(case, far, jobs[case].model, calibrations[case])
                pair = _run(pipelines[case, far], predicted, max(end_s - time.monotonic(), 0.0))
                print(f"{case.name}, {far.round_trip_ms:g} ms: {pair}", file=sys.stderr, flush=True)
                pairs[case, far].append(pair)
    return pairs


def _run(pipeline: Pipeline, predicted: SimulationResult, limit_s: float) -> Pair:
    processor_s = pipeline.processor_s(PROCESSOR_STEPS)
    steps = pipeline.steps(CALM_STEPS, limit_s)
    calm_s = tuple(step.seconds for step in steps if step.others <= DISTURBED)
    busy_s = sum(stage.busy_s for stage in predicted.stages)
    return Pair(predicted.iteration_s, busy_s, processor_s, calm_s, len(steps) - len(calm_s))


def _counted(pairs: list[Pair]) -> int:
    return sum(pair.counts for pair in pairs)


def forecast(case: Case, far: Far, model: str, calibration: Calibration) -> SimulationResult:
    """Return the predicted step; virtual chips compute at their pace, and update for real."""
    plan, profile = case.plan(far), profile_model(load_model(model))
    if case.pace is None:
        return predict(plan, pool(), profile, calibration).result
    wires, costs = simulated_links(plan, pool(), calibration), stage_costs(plan, pool(), profile, calibration)
    paced = tuple(replace(cost.load, forward_s=case.pace.forward_s, backward_s=case.pace.backward_s) for cost in costs)
    replica = Replica(stages=paced, schedule=replica_schedule(plan, costs, wires, 0))
    return simulate_training(SimulatedTraining(replicas=(replica,), links=wires), details=False)


def _calibration(case: Case, model: str, folder: Path) -> Calibration:
    """Return what `isthmus calibrate --measure` finds of a model's parts and of the links."""
    sizes = ["--micro-batch", str(case.micro_batch_size), "--sequence", str(case.sequence_length)]
    command = ["calibrate", "--measure", "--copies", "2", "--model", model, *sizes]
    command += ["--pool", str(folder / "pool.json"), "--routes", str(folder / ROUTES_FILE)]
    command += ["--output", str(folder / "here.yaml")]
    subprocess.run([sys.executable, "-m", "isthmus", *command], stdout=subprocess.DEVNULL, check=True)
    return load_calibration(folder / "here.yaml")


def real_rows(repetitions: int, minutes: float) -> Iterator[Row]:
    """Yield for each case and distance a row of every repetition that counts, then their mean and spread."""
    with tempfile.TemporaryDirectory() as made:
        pairs = measured_pairs(Path(made), repetitions, 60 * minutes)
    for (case, far), found in pairs.items():
        name = f"real, {case.name}, {far.round_trip_ms:g} ms"
        if case.pace is None and found:
            yield _processor_row(name, found)
        yield from _rows_of(name, [pair for pair in found if pair.counts])


def _processor_row(name: str, pairs: list[Pair]) -> Row:
    """Compare what computing should take of two cores with what it took, calm or not."""
    worst = max(abs(pair.busy_error) for pair in pairs)
    return compared(
        f"{name}: predicted computing of a step, both workers; {len(pairs)} repetitions, "
        f"largest error {worst:.1%}, spread {spread([pair.processor_s for pair in pairs]):.1%}",
        statistics.median(pair.predicted_busy_s for pair in pairs),
        "s",
        "processor time measured",
        statistics.median(pair.processor_s for pair in pairs),
        target="within 10 %",
        met=worst <= 0.10,
    )


def _rows_of(name: str, pairs: list[Pair]) -> Iterator[Row]:
    for number, pair in enumerate(pairs, 1):
        yield compared(
            f"{name}: predicted step, repetition {number} ({len(pair.calm_s)} calm steps, "
            f"spread {spread(pair.calm_s):.1%}, {pair.disturbed} disturbed)",
            pair.predicted_s,
            "s",
            "measured",
            pair.measured_s,
            target="within 10 %",
            met=abs(pair.error) <= 0.10,
        )
    if not pairs:
        yield Row(what=f"{name}: no repetition had enough calm steps", ours=0, unit="")
        return
    errors = [pair.error for pair in pairs]
    apart = spread([pair.measured_s for pair in pairs])
    yield Row(
        what=f"{name}: largest error of {len(pairs)}, mean {statistics.fmean(errors):+.1%}, "
        f"measured medians spread {apart:.1%}",
        ours=100 * max(abs(error) for error in errors),
        unit="%",
        target="at most 10",
        met=max(abs(error) for error in errors) <= 0.10,
    )


def run_demo(steps: int) -> dict[str, float]:
    """Run the demo for `steps` steps in a folder of its own and return its last line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "isthmus", "demo", "--json", "--steps", str(steps)]
        done = subprocess.run([*command, "--state", f"{folder}/demo"], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows(steps: int) -> list[Row]:
    """Return the rows of one demo."""
    result = run_demo(steps)
    error = result["predicted_iteration_s"] / result["iteration_s"] - 1
    near_s = result["iteration_s"] * result["efficiency"]
    return [
        compared(
            f"predicted step, {steps} steps",
            result["predicted_iteration_s"],
            "s",
            "measured",
            result["iteration_s"],
            target="within 10 %",
            met=abs(error) <= 0.10,
        ),
        compared(
            "step with wide-area links",
            result["iteration_s"],
            "s",
            "the same plan without them",
            near_s,
        ),
        Row(
            what="loss in transformers against the runtime's",
            ours=result["checkpoint_loss_difference"],
            unit="nats",
            target="at most 1e-4",
            met=result["checkpoint_loss_difference"] <= 1e-4,
        ),
    ]


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="one repetition, few steps")
    parser.add_argument("--real", action="store_true", help="leave the demo itself out")
    parser.add_argument("--minutes", type=float, default=None, help="how long calm is waited for")
    args = parser.parse_args()
    minutes = args.minutes or (QUICK_MINUTES if args.quick else MINUTES)
    found = [] if args.real else rows(QUICK_STEPS if args.quick else STEPS)
    found += real_rows(QUICK_REPETITIONS if args.quick else REPETITIONS, minutes)
    print_rows(found, args.json)


if __name__ == "__main__":
    main()
