"""Seeded faults on a real API server: what was lost, doubled or half started, the longest hold, the events missed."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks.table import Row
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.clusters import RealCluster
from tests.kubernetes.conftest import fill_server
from tests.kubernetes.faulty_run import FaultyRun
from tests.kubernetes.watched_run import WatchedRun

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS, SHARE_LOST = 200, 10, 24, 0.3
NUM_ROUNDS, NUM_QUICK_ROUNDS = 1000, 5


def fault_rows(amount: Amount) -> list[Row]:
    """Make runs by seeds until there were enough faults, or the time is over."""
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as server:
        return _faults(server, Path(folder), amount)


def event_rows(amount: Amount) -> list[Row]:
    """Make rounds of a watched list, with a fault in each, until there were enough, or the time is over."""
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as server:
        run = WatchedRun(server, seed=1)
        run.run(NUM_QUICK_ROUNDS if amount.quick else NUM_ROUNDS, lambda: amount.is_over)
    missed = run.problems.total()
    what = f"API server killed {run.num_kills:,} times, its log compacted {run.num_compactions:,} times"
    return [
        Row(what=f"{what}: of {run.num_changes:,} events lost or acted on twice", ours=missed, unit="events",
            target="0", met=not missed),
    ]  # fmt: skip


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[ApiServer]:
    server = ApiServer(folder / "server")
    try:
        server.start()
        fill_server(server)
        yield server
    finally:
        server.end()


def _faults(server: ApiServer, folder: Path, amount: Amount) -> list[Row]:
    wanted = NUM_QUICK_FAULTS if amount.quick else NUM_FAULTS
    seed, num_faults, longest_s, problems = 0, 0, 0.0, Counter[str]()
    while num_faults < wanted and not amount.is_over:
        place = folder / f"run-{seed}"
        cluster = RealCluster(place, server, seed=seed, share_lost=SHARE_LOST)
        try:
            run = FaultyRun(cluster, place, seed)
            run.run(STEPS)
        finally:
            cluster.end()
        problems += run.problems
        num_faults, longest_s, seed = num_faults + run.num_faults, max(longest_s, run.longest_hold_s), seed + 1
        text = f"seed {seed - 1}: {num_faults} faults, {dict(+run.problems)}, {run.longest_hold_s:.1f} s"
        print(text, file=sys.stderr, flush=True)
    what = f"{num_faults:,} seeded faults on a real API server, {seed} runs"
    return [
        Row(what=f"{what}: holds and workers lost, doubled, half started or left", ours=problems.total(),
            unit="cases", target="0", met=not problems.total()),
        Row(what=f"{what}: longest hold after it was given up", ours=longest_s, unit="s", target="at most 60",
            met=longest_s <= 60),
    ]  # fmt: skip
