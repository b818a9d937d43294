"""Rules of experts shared by processes: they train, save, resume and export what one process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.job import Job
from isthmus.core.plan import Plan
from tests.train.small_models import NUM_LAYERS
from tests.train.test_tensor_workers import check_resumed, shared_plan, told
from tests.train.test_worker import moved
from tests.train.worker_jobs import make_job, run_job, started, whole

pytestmark = pytest.mark.slow

STEPS = 12


def replicated(job: Job, **stage: Any) -> Plan:
    """Return the plan of two replicas of one stage each, in one cluster."""
    training = job.training
    return Plan.model_validate(
        {
            "id": "p", "dp": 2, "micro_batches": training.num_micro_batches // 2, "zero": 1,
            "micro_batch_size": training.micro_batch_size, "sequence_length": training.sequence_length,
            "stages": [
                {"replica": replica, "cluster": "a", "node_group": "cpu", "layers": (0, NUM_LAYERS), **stage}
                for replica in range(2)
            ],
        }
    )  # fmt: skip


def test_shared_experts_train_what_one_process_trains(tmp_path: Path) -> None:
    """Loss, held-out loss and result of one process, also killed and resumed with other degrees.

    1. One process trains 12 steps. 2. Two replicas share experts until a rank is killed. 3. The other ends. 4. Two
    stages, of which one shares experts among chips that share tensors, go on from the newest checkpoint.
    """
    job = make_job(tmp_path, "mixtral", steps=STEPS, training={"evaluate_every": 6}, checkpoints={"every_steps": 4})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut = moved(job, tmp_path / "cut")
    with started(tmp_path / "cut", cut, replicated(job, ep=2)) as first:
        first.wait_for_step(6)
        os.kill(first.processes[1].pid, signal.SIGKILL)
        assert first.wait()[1] == -signal.SIGKILL
    assert first.log(1).startswith("rank 1: layers 0 to 3 in cluster a, replica 1 of 2, expert-parallel rank 1 of 2")
    assert told(first) == pytest.approx(alone.losses()[: len(told(first))], rel=1e-4)
    second = run_job(tmp_path / "cut", cut, shared_plan(job, [1, 4], [{}, {"tp": 2, "ep": 2}]), attempt=2)
    check_resumed(cut, second, alone)


def test_a_lost_rank_of_an_expert_group_is_replaced(tmp_path: Path) -> None:
    """Killed in the midst of exchanges and started again: the losses are those of an undisturbed run, bit for bit."""
    job = make_job(tmp_path, "mixtral", steps=20)
    calm = run_job(tmp_path / "calm", moved(job, tmp_path / "calm"), replicated(job, ep=2))
    cut = moved(job, tmp_path / "cut")
    with started(tmp_path / "cut", cut, replicated(job, ep=2), program="supervisor") as workers:
        workers.wait_for_step(3)
        workers.kill_under_supervisor(1)
        assert workers.wait() == [0, 0], [workers.log(rank) for rank in range(2)]
    assert "rank 1 restarted: restart 1" in workers.log(1)
    steps = {one.step: one.values["loss"] for one in workers.metrics(0) if "loss" in one.values}
    assert [steps[step] for step in range(20)] == told(calm)
