"""One job over two Slurm clusters: from submission to all ranks up, beyond a bare `srun` on the slower one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks._sites_starts import end_pool, start_rows
from benchmarks.table import Row
from tests.slurm.joint_pool import JointPool
from tests.slurm.slurm_cluster import slurm_clusters

NODES, CARDS = 2, 1
NUM_JOBS, NUM_QUICK_JOBS = 60, 5


def rows(amount: Amount) -> list[Row]:
    """Submit jobs one after another to two new clusters."""
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_clusters(Path(folder), NODES, CARDS, "east", "west") as slurms,
    ):
        (Path(folder) / "pool").mkdir()
        pool = JointPool(Path(folder) / "pool", slurms)
        try:
            num = NUM_QUICK_JOBS if amount.quick else NUM_JOBS
            return start_rows("two Slurms", pool, num, p50_s=1, p99_s=3, skew_s=0.25)
        finally:
            end_pool(pool)
