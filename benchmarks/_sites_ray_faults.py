"""Seeded faults on a real Ray."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks._sites_faults import fault_rows
from benchmarks.table import Row
from isthmus.agent.courier.courier import Courier
from tests.ray.faulty_run import FaultyRun
from tests.ray.ray_cluster import RayCluster

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS = 200, 5, 12


def rows(amount: Amount) -> list[Row]:
    """Return the rows of a new cluster."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # a short path for its sockets
        cluster, courier = RayCluster(Path(folder)), Courier(Path(folder) / "state")

        def run(seed: int) -> FaultyRun:
            place = Path(folder) / f"run-{seed}"
            place.mkdir()
            made = FaultyRun(cluster, place, courier, Path(folder) / "state", seed)
            made.run(STEPS)
            return made

        try:
            cluster.start()
            return fault_rows("Ray", NUM_QUICK_FAULTS if amount.quick else NUM_FAULTS, amount, run)
        finally:
            cluster.end()
            courier.close()
