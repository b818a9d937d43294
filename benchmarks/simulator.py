"""How fast the simulator is: events per CPU-second, iterations of 1,024 to 100,000 chips, cost of folding.

`python -m benchmarks.simulator [--json] [--quick]`. Seconds are CPU seconds of this process and include the
generation of schedules. Where SimPy is installed, its kernel runs the same processes for comparison.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

from benchmarks.table import Row, compared, print_rows
from isthmus.schedule import Schedule, check_schedule, make_schedule
from isthmus.sim import Replica, SimulatedLink, SimulatedTraining, SimulationResult, StageLoad, simulate_training
from isthmus.sim.kernel import Kernel

CHIPS_PER_STAGE = 8
SIZES = (
    # chips, pipeline stages, kinds of replicas, replicas of each kind, micro-batches, seconds allowed
    (1_024, 8, 2, 8, 64, 0.05),
    (10_240, 16, 4, 20, 64, 1.0),
    (100_352, 16, 8, 98, 128, 10.0),
)


def cpu_s(work: Callable[[], object], repeats: int) -> float:
    """Return the CPU seconds of `work`, the best of `repeats`."""
    best_s = float("inf")
    for _ in range(repeats):
        start_s = time.process_time()
        work()
        best_s = min(best_s, time.process_time() - start_s)
    return best_s


def sleepers(kernel: Kernel, num_processes: int, num_naps: int) -> None:
    """Start processes that do nothing but sleep, each at a pace of its own."""

    def sleeper(pace_s: float):  # type: ignore[no-untyped-def]
        for _ in range(num_naps):
            yield kernel.now_s + pace_s

    for number in range(num_processes):
        kernel.start(sleeper(1.0 + number / 1000))


def our_events_per_s(num_naps: int, repeats: int) -> float:
    """Return the events a CPU-second of our kernel."""
    events = 0

    def work() -> None:
        nonlocal events
        kernel = Kernel()
        sleepers(kernel, 100, num_naps)
        kernel.run()
        events = kernel.num_events

    seconds = cpu_s(work, repeats)
    return events / seconds


def simpy_events_per_s(num_naps: int, repeats: int) -> float | None:
    """Return the same of SimPy's kernel, or None where it is not installed."""
    if importlib.util.find_spec("simpy") is None:
        return None
    import simpy

    def work() -> None:
        environment = simpy.Environment()

        def sleeper(pace_s: float):  # type: ignore[no-untyped-def]
            for _ in range(num_naps):
                yield environment.timeout(pace_s)

        for number in range(100):
            environment.process(sleeper(1.0 + number / 1000))
        environment.run()

    return 100 * (num_naps + 1) / cpu_s(work, repeats)


def training(schedule: Schedule, kinds: int, count: int) -> SimulatedTraining:
    """Return replicas of `kinds` speeds, `count` of each, half of whose stages are in another cluster."""
    half = schedule.num_stages // 2

    def load(stage: int, slower: float) -> StageLoad:
        return StageLoad(
            cluster="a" if stage < half else "b",
            forward_s=0.01 * slower,
            backward_s=0.02 * slower,
            boundary_bytes=1e6,
            hop_s=1e-4,
            static_bytes=1e10,
            activation_bytes=1e8,
            gradient_bytes=1e8,
            local_bytes_per_s=1e11,
            layers=(stage, stage + 1),
        )

    replicas = tuple(
        Replica(
            stages=tuple(load(stage, 1 + kind / 10) for stage in range(schedule.num_stages)),
            schedule=schedule,
            count=count,
        )
        for kind in range(kinds)
    )
    wires = {
        ends: SimulatedLink(name=">".join(ends), bytes_per_s=1e10, delay_s=0.01) for ends in (("a", "b"), ("b", "a"))
    }
    return SimulatedTraining(replicas=replicas, links=wires)


def size_row(size: tuple[int, int, int, int, int, float], name: str, repeats: int) -> Row:
    """Return the row of one size: plan in, figures of every stage and link out."""
    chips, stages, kinds, count, micro_batches, allowed_s = size
    runs: list[SimulationResult] = []

    def work() -> None:
        schedule = make_schedule(name, stages, micro_batches)
        runs.append(simulate_training(training(schedule, kinds, count), details=False))

    seconds = cpu_s(work, repeats)
    what = (
        f"an iteration of {chips:,} chips: {name}, {stages} stages of {CHIPS_PER_STAGE}, {kinds * count} "
        f"replicas of {kinds} kinds, {micro_batches} micro-batches ({runs[-1].num_events:,} events)"
    )
    return Row(what=what, ours=seconds, unit="CPU s", target=f"at most {allowed_s:g}", met=seconds <= allowed_s)


def folding_row() -> Row:
    """Return how far a folded iteration of 256 chips is from the unfolded one."""
    case = training(make_schedule("1f1b", 4, 16), 2, 4)
    folded, apart = (simulate_training(case, merge_replicas=fold, details=False).iteration_s for fold in (True, False))
    error = abs(folded / apart - 1)
    return Row(
        what="folded against unfolded, 256 chips: error of the iteration", ours=error * 100, unit="%",
        target="at most 0.1", met=error <= 1e-3,
    )  # fmt: skip


def pipeline_events_row(repeats: int) -> Row:
    """Return the events a CPU-second of an unfolded simulation, everything included."""
    case = training(make_schedule("1f1b", 8, 32), 2, 8)
    runs: list[SimulationResult] = []
    seconds = cpu_s(lambda: runs.append(simulate_training(case, merge_replicas=False, details=False)), repeats)
    what = "events of 16 unfolded pipelines, with messages, wires and accounts"
    return Row(what=what, ours=runs[-1].num_events / seconds, unit="events / CPU s")


def check_row(repeats: int) -> Row:
    """Return the time to check a schedule for completeness, order, deadlock and memory."""
    schedule = make_schedule("overlapped", 16, 64)
    seconds = cpu_s(lambda: check_schedule(schedule), repeats)
    operations = sum(len(stage) for stage in schedule.stages)
    return Row(what=f"check a schedule of {operations:,} operations", ours=seconds, unit="CPU s")


def rows(quick: bool) -> list[Row]:
    """Measure everything."""
    naps, repeats = (1_000, 2) if quick else (5_000, 5)
    ours, simpys = our_events_per_s(naps, repeats), simpy_events_per_s(naps, repeats)
    verdict = {"target": "at least 500,000", "met": ours >= 5e5}
    what, unit = "kernel: events of 100 sleeping processes", "events / CPU s"
    made = [
        Row(what=what, ours=ours, unit=unit, **verdict)
        if simpys is None
        else compared(what, ours, unit, "SimPy", simpys, **verdict)
    ]
    made.append(pipeline_events_row(repeats))
    made += [size_row(size, "1f1b", repeats) for size in SIZES]
    made.append(size_row(SIZES[-1], "overlapped", repeats))
    return [*made, folding_row(), check_row(repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    print_rows(rows(options.quick), options.json)


if __name__ == "__main__":
    main()
