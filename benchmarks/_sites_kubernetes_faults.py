"""Seeded faults on a real API server: what was lost, doubled or half started, the longest hold, the events missed."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks._sites_faults import fault_rows
from benchmarks._sites_record import SeededRuns
from benchmarks.table import Row
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.clusters import RealCluster
from tests.kubernetes.conftest import fill_server
from tests.kubernetes.faulty_run import FaultyRun
from tests.kubernetes.samples import NAMESPACE
from tests.kubernetes.watched_run import WatchedRun

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS, SHARE_LOST = 200, 10, 24, 0.3
NUM_ROUNDS, NUM_QUICK_ROUNDS, ROUNDS_OF_A_SEED = 1000, 5, 25


def rows(amount: Amount) -> list[Row]:
    """Return the rows of faults."""
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder)) as server:

        def run(seed: int) -> FaultyRun:
            place = Path(folder) / f"run-{seed}"
            cluster = RealCluster(place, server, seed=seed, share_lost=SHARE_LOST)
            try:
                made = FaultyRun(cluster, place, seed)
                made.run(STEPS)
                return made
            finally:
                cluster.end()

        return fault_rows("API server", NUM_QUICK_FAULTS if amount.quick else NUM_FAULTS, amount, run)


def event_rows(amount: Amount) -> list[Row]:
    """Make rounds of watched lists, with a fault in each, until there were enough, or the time is over."""
    wanted = NUM_QUICK_ROUNDS if amount.quick else NUM_ROUNDS
    with (
        tempfile.TemporaryDirectory() as folder,
        _lean_server(Path(folder)) as server,
        amount.seeded_runs("events") as runs,
    ):
        while (num_done := _sum(runs, "rounds")) < wanted and not amount.is_over:
            seed = runs.take()
            run = WatchedRun(server, seed)
            num_rounds = run.run(min(ROUNDS_OF_A_SEED, wanted - num_done), lambda: amount.is_over)
            counts = {"rounds": num_rounds, "kills": run.num_kills, "compactions": run.num_compactions}
            counts |= {"changes": run.num_changes, "missed": run.problems.total()}
            runs.note(seed, counts)
            print(f"seed {seed}: {counts}, {dict(+run.problems)}", file=sys.stderr, flush=True)
        num_kills, num_compactions, num_changes, missed = (
            _sum(runs, name) for name in ("kills", "compactions", "changes", "missed")
        )
    what = f"API server killed {num_kills:,} times, its log compacted {num_compactions:,} times"
    return [
        Row(what=f"{what}: of {num_changes:,} events lost or acted on twice", ours=missed, unit="events",
            target="0", met=not missed),
    ]  # fmt: skip


def _sum(runs: SeededRuns, name: str) -> int:
    return sum(one[name] for one in runs.results)


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[ApiServer]:
    server = ApiServer(folder / "server")
    try:
        server.start()
        fill_server(server)
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def _lean_server(folder: Path) -> Iterator[ApiServer]:
    server = ApiServer(folder / "server", lean=True)
    try:
        server.start()
        server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        yield server
    finally:
        server.end()
