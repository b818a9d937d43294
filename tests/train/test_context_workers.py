"""Rules of sequences shared by processes: they train, save, resume and export what one process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from isthmus.train.process.verify import verify
from tests.train.test_tensor_workers import shared_plan, told
from tests.train.test_worker import moved
from tests.train.worker_jobs import make_job, run_job, started, whole

pytestmark = pytest.mark.slow

STEPS = 12


def test_shared_sequences_train_what_one_process_trains(tmp_path: Path) -> None:
    """Loss, held-out loss and result of one process, also killed and resumed with other degrees.

    1. One process trains 12 steps. 2. Two stages share sequences, unlike each other, until a rank is killed. 3. The
    others end. 4. A plan of other degrees goes on from the newest checkpoint.
    """
    job = make_job(tmp_path, "llama-tied", steps=STEPS, training={"evaluate_every": 6}, checkpoints={"every_steps": 4})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut = moved(job, tmp_path / "cut")
    plan = shared_plan(job, [2, 4], [{"cp": 2, "cp_kind": "ring"}, {"cp": 2, "cp_kind": "all_to_all"}])
    with started(tmp_path / "cut", cut, plan) as first:
        first.wait_for_step(6)
        os.kill(first.processes[1].pid, signal.SIGKILL)
        assert first.wait()[1] == -signal.SIGKILL
    assert first.log(1).startswith("rank 1: layers 0 to 1 in cluster a, context-parallel rank 1 of 2")
    assert told(first) == pytest.approx(alone.losses()[: len(told(first))], rel=1e-4)
    second = run_job(tmp_path / "cut", cut, shared_plan(job, [1, 4], [{}, {"cp": 2, "tp": 2}]), attempt=2)
    resumed = STEPS - len(told(second))
    assert resumed in (4, 8)
    assert told(second) == pytest.approx(alone.losses()[resumed:], rel=1e-4)
    held_out = alone.losses("validation_loss")[-1]
    assert told(second, "validation_loss")[-1] == pytest.approx(held_out, rel=1e-4)
    assert verify(cut)["loss"] == pytest.approx(held_out, rel=1e-4)
