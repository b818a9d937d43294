"""Seeded faults on a real API server: what was lost, doubled or half started, the longest hold, the events missed."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.table import Row
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.clusters import RealCluster
from tests.kubernetes.conftest import fill_server
from tests.kubernetes.faulty_run import FaultyRun
from tests.kubernetes.watched_run import WatchedRun

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS, SHARE_LOST = 200, 10, 24, 0.3
NUM_ROUNDS, NUM_QUICK_ROUNDS = 1000, 5


def rows(quick: bool) -> list[Row]:
    """Make runs by seeds until there were enough faults, then rounds of a watched list."""
    with tempfile.TemporaryDirectory() as folder:
        server = ApiServer(Path(folder) / "server")
        try:
            server.start()
            fill_server(server)
            found = _faults(server, Path(folder), NUM_QUICK_FAULTS if quick else NUM_FAULTS)
            return found + _events(server, NUM_QUICK_ROUNDS if quick else NUM_ROUNDS)
        finally:
            server.end()


def _faults(server: ApiServer, folder: Path, wanted: int) -> list[Row]:
    seed, num_faults, longest_s, problems = 0, 0, 0.0, Counter[str]()
    while num_faults < wanted:
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


def _events(server: ApiServer, num_rounds: int) -> list[Row]:
    run = WatchedRun(server, seed=1)
    run.run(num_rounds)
    missed = run.problems.total()
    what = f"API server killed {run.num_kills:,} times, its log compacted {run.num_compactions:,} times"
    return [
        Row(what=f"{what}: of {run.num_changes:,} events lost or acted on twice", ours=missed, unit="events",
            target="0", met=not missed),
    ]  # fmt: skip
