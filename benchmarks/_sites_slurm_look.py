"""One look of an agent at a Slurm cluster with 2,000 jobs, beside a bare `squeue` of their ids."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks._sites_looks import look_rows
from benchmarks.table import Row
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster, slurm_clusters

NUM_JOBS, NUM_QUICK_JOBS = 2000, 200


class CountingCommands(SlurmCommands):
    """Commands that are counted."""

    num = 0

    def run_fully(self, *command: str) -> tuple[str, str]:
        """Run a command."""
        CountingCommands.num += 1
        return super().run_fully(*command)


def rows(amount: Amount) -> list[Row]:
    """Look at users' jobs, most of which wait, in turn with the bare command."""
    num = NUM_QUICK_JOBS if amount.quick else NUM_JOBS
    with tempfile.TemporaryDirectory() as folder, slurm_clusters(Path(folder), 4, 8, "east") as slurms:
        slurm = slurms["east"]
        _submit(slurm, num)
        adapter = adapter_of(slurm, Path(folder) / "state", ("true",), CountingCommands(config=str(slurm.conf)))
        assert len(adapter.observe().foreign) == num
        return look_rows(
            f"one look at {num:,} jobs", "squeue of their ids", adapter.observe, lambda: _bare(slurm),
            lambda: CountingCommands.num, asked="commands", apart="those for the nodes",
        )  # fmt: skip


def _submit(slurm: SlurmCluster, num: int) -> None:
    script = slurm.root / "job.sh"
    script.write_text("#!/bin/sh\nsleep 10000\n")
    subprocess.run(
        ("xargs", "-P2", "-I@", "sbatch", "-Q", "--gpus=1", "-o", "/dev/null", "-J", "user-@", str(script)),
        input="\n".join(map(str, range(num))).encode(), env=slurm.environment, check=True, stdout=subprocess.DEVNULL,
        timeout=600,
    )  # fmt: skip


def _bare(slurm: SlurmCluster) -> None:
    slurm.run("squeue", "-h", "-o", "%A")
