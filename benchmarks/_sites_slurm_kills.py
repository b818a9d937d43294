"""`kill -9` of slurmctld within 2 s of 20 accepted jobs: jobs lost and doubled, beside jobs of plain `sbatch`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks._sites_amount import Amount
from benchmarks.table import Row, compared
from tests.slurm.killed_jobs import KilledJobs
from tests.slurm.slurm_cluster import slurm_clusters

NUM_KILLS, NUM_JOBS = 50, 20


def rows(amount: Amount) -> list[Row]:
    """Kill slurmctld at random times by seeds, at least once, until the time is over."""
    num, num_jobs = (2, 6) if amount.quick else (NUM_KILLS, NUM_JOBS)
    rounds: list[KilledJobs] = []
    with tempfile.TemporaryDirectory() as folder, slurm_clusters(Path(folder), 3, 8, "east") as slurms:
        for seed in range(num):
            one = KilledJobs(slurms["east"], Path(folder) / f"run-{seed}", seed, num_jobs)
            one.run(with_plain_jobs=True)
            rounds.append(one)
            counts = (one.num_lost, one.num_doubled, one.num_restarted, one.num_plain_lost)
            text = f"kill {seed}: lost, doubled, restarted, plain lost: {counts}, all run after {one.recovery_s:.0f} s"
            print(text, f"; {one.story}" if one.num_lost or one.num_doubled else "", file=sys.stderr, flush=True)
            if amount.is_over:
                break
    what = f"slurmctld killed within 2 s of {num_jobs} accepted jobs, {len(rounds)} times"
    lost, doubled = sum(one.num_lost for one in rounds), sum(one.num_doubled for one in rounds)
    return [
        compared(f"{what}: jobs lost", lost, "jobs", "plain sbatch", sum(one.num_plain_lost for one in rounds),
                 target="0", met=lost == 0),
        Row(what=f"{what}: jobs doubled", ours=doubled, unit="jobs", target="0", met=doubled == 0),
        Row(what=f"{what}: parts that ended and began again", ours=sum(one.num_restarted for one in rounds),
            unit="parts"),
        Row(what=f"{what}: all jobs run again after the kill, longest", ours=max(one.recovery_s for one in rounds),
            unit="s"),
        Row(what=f"{what}: all cards back after the release, longest", ours=max(one.release_s for one in rounds),
            unit="s", target="at most 60", met=max(one.release_s for one in rounds) <= 60),
    ]  # fmt: skip
