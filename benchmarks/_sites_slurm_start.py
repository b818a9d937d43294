"""One job over two Slurm clusters: from submission to all ranks up, beyond a bare `srun` on the slower one."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks.table import Row, compared
from tests.control.processes import until
from tests.slurm.joint_pool import JointPool
from tests.slurm.slurm_cluster import SlurmCluster, slurm_clusters

NODES, CARDS = 2, 1
RANKS = 2 * NODES * CARDS
STEPS = 1_000_000


def rows(amount: Amount) -> list[Row]:
    """Submit jobs one after another; before each, run the same line with `srun` on both clusters."""
    num = 5 if amount.quick else 60
    beyond_s, skews_s, bare_s = [], [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_clusters(Path(folder), NODES, CARDS, "east", "west") as slurms,
    ):
        (Path(folder) / "pool").mkdir()
        pool = JointPool(Path(folder) / "pool", slurms)
        try:
            _wait_free(pool)
            for number in range(num + 1):
                bare = max(_bare_s(slurm, Path(folder) / "up") for slurm in slurms.values())
                _wait_free(pool)
                joint = pool.joint_job(f"job-{number}", steps=STEPS)
                begun_s = time.time()
                job = pool.submit_joint(joint)
                until(lambda: len(pool.ups(job)) == RANKS, "all ranks are up", 60)  # noqa: B023 - called at once
                ups = pool.ups(job)
                pool.call("POST", f"/v1/jobs/{job}/cancel")
                _wait_free(pool)
                if number:  # the first one also loads the planner
                    bare_s.append(bare)
                    beyond_s.append(ups[-1] - begun_s - bare)
                    skews_s.append(ups[-1] - ups[0])
        finally:
            for site in slurms:
                pool.end(site)
            pool.close()
    what = f"one job over two Slurms, {RANKS} ranks, {num} times: submission to all ranks up, beyond a bare srun"
    skew = "one job over two Slurms: skew of its ranks"
    bare = statistics.median(bare_s)
    return [
        compared(f"{what}, p50", _share(beyond_s, 0.5), "s", "bare srun on the slower cluster", bare,
                 target="at most 1", met=_share(beyond_s, 0.5) <= 1),
        Row(what=f"{what}, p99", ours=_share(beyond_s, 0.99), unit="s", target="at most 3",
            met=_share(beyond_s, 0.99) <= 3),
        Row(what=f"{skew}, p50", ours=1e3 * _share(skews_s, 0.5), unit="ms"),
        Row(what=f"{skew}, p99", ours=1e3 * _share(skews_s, 0.99), unit="ms", target="at most 250",
            met=_share(skews_s, 0.99) <= 0.25),
    ]  # fmt: skip


def _bare_s(slurm: SlurmCluster, file: Path) -> float:
    """Return the seconds from the start of `srun` to the first line of its program."""
    file.unlink(missing_ok=True)
    begun_s = time.time()
    slurm.run("srun", "--ntasks=1", "--gpus-per-task=1", "--chdir=/", "sh", "-c", f"date +%s.%N >{file}")
    return float(file.read_text()) - begun_s


def _wait_free(pool: JointPool) -> None:
    """Wait until both clusters are empty and the server knows it."""
    for slurm in pool.slurms.values():
        slurm.wait_empty()
    until(lambda: set(pool.free().values()) == {NODES * CARDS}, "all cards are free", 60)


def _share(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
