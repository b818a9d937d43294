"""Pipelines of virtual chips, run: emulated links or packets, a process per stage, and what a step took."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._wan_stage import StageJob, StepTime, span_s
from isthmus.core.plan import StageTime
from isthmus.core.pool import Pool
from isthmus.schedule import Schedule
from isthmus.wan.emulator import ROUTES_FILE, run_links
from isthmus.wan.netns import emulated_namespaces

OVERRUN_SHARE = 0.01
PATIENCE_S = 900.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks._wan_stage", "benchmarks._wan_peer"])


@dataclass(frozen=True)
class Bed:
    """Where stages run: how each cluster reaches the others, or the namespace and address that it is."""

    routes: dict[str, dict[str, str]] = field(default_factory=dict)
    sites: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Times:
    """The steps of a run but the first: seconds, calm or not, and the share that communication calls took."""

    steps_s: tuple[float, ...]
    calm: tuple[bool, ...]
    calls: tuple[float, ...]

    @property
    def kept_s(self) -> list[float]:
        """The calm steps; all of them, where there are none."""
        return [s for s, calm in zip(self.steps_s, self.calm, strict=True) if calm] or list(self.steps_s)

    @property
    def typical_s(self) -> float:
        """The median of the calm steps."""
        return statistics.median(self.kept_s)

    @property
    def said(self) -> str:
        """How many steps were calm, and their spread."""
        kept = self.kept_s
        spread = f"{min(kept):.3f} to {max(kept):.3f} s"
        return f"{sum(self.calm)} of {len(self.calm)} steps undisturbed, {spread}"


def pool_of(clusters: str, round_trip_ms: float, gbps: float, **link: Any) -> Pool:
    """Return a pool whose clusters are joined by links of that round trip."""
    names = sorted(set(clusters))
    group = {"chip": "H20", "nodes": 1, "chips_per_node": 8}
    link |= {"bandwidth_gbps": gbps, "delay_ms": round_trip_ms / 2}
    ends = [(a, b) for a in names for b in names if a != b]
    return Pool.model_validate(
        {
            "clusters": [{"name": one, "owner": one, "node_groups": [group]} for one in names],
            "links": [{"from": a, "to": b, **link} for a, b in ends],
        }
    )


@contextmanager
def relayed(pool: Pool) -> Iterator[Bed]:
    """Emulate a pool's links without root, in a process of their own."""
    if len(pool.clusters) == 1:
        yield Bed()
        return
    with tempfile.TemporaryDirectory() as folder:
        process = _CONTEXT.Process(target=run_links, args=(pool, Path(folder)))
        process.start()
        try:
            while not (Path(folder) / ROUTES_FILE).exists():
                time.sleep(0.05)
            yield Bed(json.loads((Path(folder) / ROUTES_FILE).read_text(encoding="utf-8")))
        finally:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)
            process.join()


@contextmanager
def packets(pool: Pool) -> Iterator[Bed]:
    """Emulate a pool with root: packets by a TUN device per cluster, which any program's TCP sees."""
    if len(pool.clusters) == 1:
        yield Bed()
        return
    with emulated_namespaces(pool) as spaces:
        yield Bed(sites={name: (one.namespace, one.address) for name, one in spaces.sites.items()})


def measure(
    bed: Bed, clusters: str, schedule: Schedule, times: Sequence[StageTime], shape: tuple[int, int],
    steps: int, run: Callable[[StageJob, Connection], None], **more: Any,
) -> Times:  # fmt: skip
    """Return what `steps` steps took after a first one; `run` is each stage's program.

    A step is calm unless computing overran its time by more than 1 % of the step at some stage.
    """
    ranks: list[list[StepTime]] = launch(bed, clusters, schedule, times, shape, steps, run, **more)
    rounds = list(zip(*(one[1:] for one in ranks), strict=True))
    spans = [span_s(each) for each in rounds]
    return Times(
        tuple(spans),
        tuple(
            max(one.overrun_s for one in each) <= OVERRUN_SHARE * span for each, span in zip(rounds, spans, strict=True)
        ),
        tuple(max(one.calls_s for one in each) / span for each, span in zip(rounds, spans, strict=True)),
    )


def launch(
    bed: Bed, clusters: Sequence[str], schedule: Schedule, times: Sequence[StageTime], shape: tuple[int, int],
    steps: int, run: Callable[[StageJob, Connection], None], **more: Any,
) -> list[Any]:  # fmt: skip
    """Run one process per stage and return what each sent back."""
    pipes, processes = [], []
    hosts = tuple(bed.sites[one][1] if bed.sites else "127.0.0.1" for one in clusters)
    for rank, cluster in enumerate(clusters):
        near, far = _CONTEXT.Pipe()
        job = StageJob(
            rank=rank, clusters=tuple(clusters), schedule=schedule, times=tuple(times), shape=shape,
            steps=steps + 1, hosts=hosts, routes=bed.routes.get(cluster, {}),
            namespace=bed.sites[cluster][0] if bed.sites else None, **more,
        )  # fmt: skip
        processes.append(_CONTEXT.Process(target=run, args=(job, far), daemon=True))
        processes[-1].start()
        far.close()
        pipes.append(near)
    try:
        ports = [_received(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(ports)
        found = [_received(pipe) for pipe in pipes]
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _received(pipe: Connection) -> Any:
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"a stage said nothing for {PATIENCE_S:g} s")
    return pipe.recv()
