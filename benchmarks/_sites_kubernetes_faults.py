"""Seeded faults on a real API server: what was lost, doubled or half started, the longest hold, the events missed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks._sites_faults import fault_rows
from benchmarks.table import Row
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.clusters import RealCluster
from tests.kubernetes.conftest import fill_server
from tests.kubernetes.faulty_run import FaultyRun
from tests.kubernetes.watched_run import WatchedRun

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS, SHARE_LOST = 200, 10, 24, 0.3
NUM_ROUNDS, NUM_QUICK_ROUNDS = 1000, 5


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
