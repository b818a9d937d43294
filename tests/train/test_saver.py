"""Rules of a run's checkpoints on disk while its ranks come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from isthmus.train.checkpoint.checkpoint_folder import read_manifests
from tests.train.worker_jobs import make_job, make_plan, started


@pytest.mark.slow
def test_checkpoints_are_complete_also_after_a_rank_was_started_again(tmp_path: Path) -> None:
    """Ranks that went on from memory and one that is new write parts of the same checkpoints.

    1. Three ranks train. 2. One is killed and started again in place. 3. Every checkpoint is there.
    """
    job = make_job(tmp_path, steps=60, checkpoints={"every_steps": 20, "keep": 3})
    plan = make_plan(job, [1, 3, 4], "aab")
    with started(tmp_path, job, plan, program="supervisor") as workers:
        workers.wait_for_step(4)
        (process,) = psutil.Process(workers.processes[1].pid).children()
        os.kill(process.pid, signal.SIGKILL)
        assert workers.wait() == [0, 0, 0]
    assert "rank 1 restarted" in workers.log(1)
    assert [one.step for one in read_manifests(tmp_path / "checkpoints")] == [60, 40, 20]
