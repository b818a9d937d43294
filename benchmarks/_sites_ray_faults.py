"""Seeded faults on a real Ray: what was lost, doubled or left, and the longest hold."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks.table import Row
from isthmus.agent.courier.courier import Courier
from tests.ray.faulty_run import FaultyRun
from tests.ray.ray_cluster import RayCluster

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS = 200, 5, 12


def rows(amount: Amount) -> list[Row]:
    """Make runs by seeds until there were enough faults, or the time is over."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # a short path for its sockets
        cluster, courier = RayCluster(Path(folder)), Courier(Path(folder) / "state")
        try:
            cluster.start()
            return _faults(cluster, courier, Path(folder), amount)
        finally:
            cluster.end()
            courier.close()


def _faults(cluster: RayCluster, courier: Courier, folder: Path, amount: Amount) -> list[Row]:
    wanted = NUM_QUICK_FAULTS if amount.quick else NUM_FAULTS
    seed, num_faults, longest_s, problems = 0, 0, 0.0, Counter[str]()
    while num_faults < wanted and not amount.is_over:
        place = folder / f"run-{seed}"
        place.mkdir()
        run = FaultyRun(cluster, place, courier, folder / "state", seed)
        run.run(STEPS)
        problems += run.problems
        num_faults, longest_s, seed = num_faults + run.num_faults, max(longest_s, run.longest_hold_s), seed + 1
        text = f"seed {seed - 1}: {num_faults} faults, {dict(+run.problems)}, {run.longest_hold_s:.1f} s"
        print(text, file=sys.stderr, flush=True)
    what = f"{num_faults:,} seeded faults on a real Ray, {seed} runs"
    return [
        Row(what=f"{what}: holds and workers lost, doubled or left", ours=problems.total(), unit="cases", target="0",
            met=not problems.total()),
        Row(what=f"{what}: longest hold after it was given up", ours=longest_s, unit="s", target="at most 60",
            met=longest_s <= 60),
    ]  # fmt: skip
