"""One job over a Slurm, a Ray and a local site: from submission to all ranks up, beyond a bare `srun`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks._sites_starts import end_pool, start_rows
from benchmarks.table import Row
from tests.ray.ray_cluster import RayCluster
from tests.slurm.joint_pool import JointPool, local_site, ray_site
from tests.slurm.slurm_cluster import slurm_clusters

CARDS = 1
NUM_JOBS, NUM_QUICK_JOBS = 30, 3


def rows(amount: Amount) -> list[Row]:
    """Submit jobs one after another to new clusters: a node of Slurm, two of Ray, and this machine."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,  # a short path for Ray's sockets
        slurm_clusters(Path(folder), 1, CARDS, "west") as slurms,
    ):
        for name in ("pool", "ray"):
            (Path(folder) / name).mkdir()
        ray = RayCluster(Path(folder) / "ray", cards=CARDS)
        try:
            ray.start()
            others = {"north": ray_site(ray), "south": local_site()}
            pool = JointPool(Path(folder) / "pool", slurms, others=others)
            try:
                num = NUM_QUICK_JOBS if amount.quick else NUM_JOBS
                return start_rows("Slurm, Ray and local", pool, num, p50_s=2)
            finally:
                end_pool(pool)
        finally:
            ray.end()
