"""Seeded faults on a real Slurm: whatever happens, no card is in two holds, no program runs twice, nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.faulty_run import FaultyRun
from tests.slurm.killed_jobs import KilledJobs
from tests.slurm.slurm_cluster import SlurmCluster

NUM_WHOLE, NUM_SHORT = 25, 1
STEPS = 12


@pytest.mark.slow
def test_no_fault_doubles_or_leaves_anything(whole: bool, beta: SlurmCluster, tmp_path: Path) -> None:
    """Random steps with faults between them; every run settles, and ends with an empty cluster."""
    for seed in range(NUM_WHOLE if whole else NUM_SHORT):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run = FaultyRun(beta, folder, seed)
        run.run(STEPS)
        assert not +run.problems, f"seed {seed}: {+run.problems}, {run.steps}"


@pytest.mark.slow
def test_jobs_accepted_before_slurmctld_is_killed_are_neither_lost_nor_doubled(
    whole: bool, beta: SlurmCluster, tmp_path: Path
) -> None:
    """1. An agent has prepared jobs. 2. slurmctld is killed and started again. 3. Each job runs once."""
    for seed in range(5 if whole else 1):
        jobs = KilledJobs(beta, tmp_path / str(seed), seed, num_jobs=8 if whole else 4)
        jobs.run()
        assert (jobs.num_lost, jobs.num_doubled) == (0, 0), f"seed {seed}: {jobs.story}"
