"""Seeded faults on a real Slurm."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks._sites_faults import fault_rows
from benchmarks.table import Row
from tests.slurm.faulty_run import FaultyRun
from tests.slurm.slurm_cluster import slurm_clusters

NUM_FAULTS, NUM_QUICK_FAULTS, STEPS = 1000, 10, 24


def rows(amount: Amount) -> list[Row]:
    """Return the rows of a new cluster."""
    with tempfile.TemporaryDirectory() as folder, slurm_clusters(Path(folder), 2, 4, "east") as slurms:

        def run(seed: int) -> FaultyRun:
            place = Path(folder) / f"run-{seed}"
            place.mkdir()
            made = FaultyRun(slurms["east"], place, seed)
            made.run(STEPS)
            return made

        return fault_rows("Slurm", NUM_QUICK_FAULTS if amount.quick else NUM_FAULTS, amount, run)
