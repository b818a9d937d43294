"""What distance costs a pipeline: `python -m benchmarks.wan_pipeline [--json] [--quick]`.

Six stages in processes of their own, chips that are virtual (a forward waits 20 ms, a backward 40),
activations of 2 MiB over emulated links of 1 Gbit/s. Every step is set beside the critical path of the same
schedule on the same wires (`isthmus.sim`), the same stages without a WAN, and 1F1B with blocking exchanges on
the same links. A step counts unless computing overran its time by more than 1 % of the step at some stage:
then the machine was busy with something else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._wan_stage import StageJob, StepTime, run_stage, span_s
from benchmarks.table import Row, compared, print_rows
from isthmus.core.plan import StageTime
from isthmus.core.pool import Pool
from isthmus.schedule import Schedule, one_f_one_b, overlapped
from isthmus.sim import Wire, best_warm_up, run_pipeline
from isthmus.wan.emulator import ROUTES, run_links

STAGES = 6
TIME = StageTime(forward_s=0.02, backward_s=0.04)
SHAPE = (512, 1024)
MESSAGE_BYTES = SHAPE[0] * SHAPE[1] * 4
GBPS = 1.0
WIRE_SHARE = 0.965
"""What of a wire's rate is left to payload: frames, IP and TCP take the rest."""

OVERRUN_SHARE = 0.01
HOPS = {1: "aaabbb", 2: "aabbcc"}
WITHIN = {20: 1.02, 50: 1.03, 100: 1.04}


def pool_of(clusters: str, round_trip_ms: float) -> Pool:
    """Return a pool whose neighbouring clusters are joined by links of that round trip."""
    names = sorted(set(clusters))
    group = {"chip": "H20", "nodes": 1, "chips_per_node": 8}
    link = {"bandwidth_gbps": GBPS, "delay_ms": round_trip_ms / 2}
    ends = [(a, b) for a in names for b in names if a != b]
    return Pool.model_validate(
        {
            "clusters": [{"name": one, "owner": one, "node_groups": [group]} for one in names],
            "links": [{"from": a, "to": b, **link} for a, b in ends],
        }
    )


def wires_of(clusters: str, round_trip_ms: float) -> dict[tuple[int, int], Wire]:
    """Return the wires between the stages that lie in different clusters, by stages."""
    wires = {}
    for stage in range(len(clusters) - 1):
        a, b = clusters[stage], clusters[stage + 1]
        if a != b:
            for ends, name in (((stage, stage + 1), a + b), ((stage + 1, stage), b + a)):
                rate = GBPS * 1e9 / 8 * WIRE_SHARE
                wires[ends] = Wire(name=name, bytes_per_s=rate, delay_s=round_trip_ms / 2e3)
    return wires


@contextmanager
def emulated(pool: Pool) -> Iterator[dict[str, dict[str, str]]]:
    """Yield the routes of a pool's links, which a process of its own emulates."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=run_links, args=(pool, Path(folder)))
        process.start()
        try:
            while not (Path(folder) / ROUTES).exists():
                time.sleep(0.05)
            yield _routes(Path(folder) / ROUTES)
        finally:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)
            process.join()


def _routes(file: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def measure(
    clusters: str, schedule: Schedule, routes: dict[str, dict[str, str]], steps: int
) -> list[tuple[float, bool]]:
    """Return the seconds of every step after the first, and whether the machine was left alone in it."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(len(clusters)):
        near, far = context.Pipe()
        job = StageJob(
            rank=rank, clusters=tuple(clusters), routes=routes.get(clusters[rank], {}), schedule=schedule,
            time=TIME, shape=SHAPE, steps=steps + 1,
        )  # fmt: skip
        processes.append(context.Process(target=run_stage, args=(job, far)))
        processes[-1].start()
        pipes.append(near)
    ports = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(ports)
    ranks: list[list[StepTime]] = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    found = []
    for each in zip(*(steps_of[1:] for steps_of in ranks), strict=True):
        step_s = span_s(each)
        found.append((step_s, max(one.overrun_s for one in each) <= OVERRUN_SHARE * step_s))
    return found


def typical(steps: Sequence[tuple[float, bool]]) -> tuple[float, str]:
    """Return the median of the undisturbed steps (of all, where there are none), and words on how many."""
    calm = [step_s for step_s, alone in steps if alone]
    kept = calm or [step_s for step_s, _ in steps]
    spread = f"{min(kept):.3f} to {max(kept):.3f} s"
    return statistics.median(kept), f"{len(calm)} of {len(steps)} steps undisturbed, {spread}"


def rows(quick: bool) -> Iterator[Row]:
    """Yield a row per round trip, number of micro-batches and number of hops."""
    steps, times = (3 if quick else 6), [TIME] * STAGES
    for count in (15,) if quick else (15, 64):
        one_site, said = typical(measure("a" * STAGES, best(count, {})[0], {}, steps))
        bound_s = run_pipeline(best(count, {})[0], times, {}, MESSAGE_BYTES).step_s
        yield _row(f"one cluster, {count} micro-batches ({said})", one_site, bound_s, 1.02)
        for hops, clusters in HOPS.items():
            for round_trip_ms in (20,) if quick else (20, 50, 100):
                wires = wires_of(clusters, round_trip_ms)
                schedule, bound_s = best(count, wires)
                blocking = one_f_one_b(STAGES, count)
                with emulated(pool_of(clusters, round_trip_ms)) as routes:
                    ours_s, said = typical(measure(clusters, schedule, routes, steps))
                    theirs_s, _ = typical(measure(clusters, blocking, routes, max(steps // 2, 2)))
                what = f"{round_trip_ms} ms, {hops} hops, {count} micro-batches"
                yield _row(f"{what} ({said})", ours_s, bound_s, WITHIN[round_trip_ms])
                yield compared(
                    f"{what}: one cluster's share", 100 * one_site / ours_s, "%", "one cluster", 100.0
                )
                yield compared(f"{what}: times as fast", theirs_s / ours_s, "x", "our 1F1B, blocking", 1.0)


def best(count: int, wires: dict[tuple[int, int], Wire]) -> tuple[Schedule, float]:
    """Return the overlapped schedule with the best warm-up, and its critical path in seconds."""
    warm_up, bound_s = best_warm_up([TIME] * STAGES, wires, MESSAGE_BYTES, count, [count] * STAGES)
    return overlapped(STAGES, count, warm_up), bound_s


def _row(what: str, ours_s: float, bound_s: float, within: float) -> Row:
    ratio = ours_s / bound_s
    return Row(
        what=what, ours=ours_s, unit="s a step", peer="critical path", peer_value=bound_s, ratio=ratio,
        target=f"within {within - 1:.0%}", met=ratio <= within,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="15 micro-batches, 20 ms, fewer steps")
    chosen: Any = parser.parse_args(arguments)
    print_rows(list(rows(chosen.quick)), chosen.json)


if __name__ == "__main__":
    main()
