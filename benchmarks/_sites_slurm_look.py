"""One look of an agent at a Slurm cluster with 2,000 jobs, beside a bare `squeue` of their ids."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.table import Row, compared
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from tests.slurm.samples import adapter_of
from tests.slurm.slurm_cluster import SlurmCluster, slurm_clusters

NUM_JOBS, NUM_QUICK_JOBS, LOOKS, PAUSE_S = 2000, 200, 30, 0.3


class CountingCommands(SlurmCommands):
    """Commands that are counted."""

    num = 0

    def run_fully(self, *command: str) -> tuple[str, str]:
        """Run a command."""
        CountingCommands.num += 1
        return super().run_fully(*command)


def rows(quick: bool) -> list[Row]:
    """Look at users' jobs, most of which wait, in turn with the bare command."""
    num = NUM_QUICK_JOBS if quick else NUM_JOBS
    with tempfile.TemporaryDirectory() as folder, slurm_clusters(Path(folder), 4, 8, "east") as slurms:
        slurm = slurms["east"]
        _submit(slurm, num)
        adapter = adapter_of(slurm, Path(folder) / "state", ("true",), CountingCommands(config=str(slurm.conf)))
        assert len(adapter.observe().foreign) == num
        looks, bare, cpu, bare_cpu = [], [], [], []
        CountingCommands.num = 0
        for _ in range(LOOKS):
            for action, times, cpus in ((adapter.observe, looks, cpu), (lambda: _bare(slurm), bare, bare_cpu)):
                took_s, cpu_s = _measured(action)
                times.append(1e3 * took_s)
                cpus.append(1e3 * cpu_s)
                time.sleep(PAUSE_S)
        commands = CountingCommands.num / LOOKS
    what, peer = f"one look at {num:,} jobs", "squeue of their ids"
    return [
        compared(f"{what}, p50", statistics.median(looks), "ms", peer, statistics.median(bare), target="at most 100",
                 met=statistics.median(looks) <= 100),
        Row(what=f"{what}: commands, with those for the nodes now and then", ours=commands, unit="commands",
            target="one, nodes apart", met=commands < 1.5),
        compared(f"{what}, p50", statistics.median(cpu), "CPU ms", peer, statistics.median(bare_cpu)),
    ]  # fmt: skip


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


def _measured(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of `action`, and the CPU seconds of this process and its children."""
    before, begun_s = psutil.Process().cpu_times(), time.perf_counter()
    action()
    took_s, after = time.perf_counter() - begun_s, psutil.Process().cpu_times()
    fields = ("user", "system", "children_user", "children_system")
    return took_s, sum(getattr(after, field) - getattr(before, field) for field in fields)
