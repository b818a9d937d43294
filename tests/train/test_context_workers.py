"""Rules of sequences shared by processes: they train, save, resume and export what one process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.train.test_tensor_workers import check_resumed, shared_plan, told
from tests.train.test_worker import moved
from tests.train.worker_jobs import make_job, run_job, started, whole

pytestmark = pytest.mark.slow

STEPS = 12


def test_shared_sequences_train_what_one_process_trains(tmp_path: Path) -> None:
    """Loss, held-out loss and result of one process, also killed and resumed with other degrees.

    1. One process trains 12 steps. 2. Two stages share sequences, unlike each other, one of them unevenly, until a rank
    is killed. 3. The others end. 4. A plan of other degrees goes on from the newest checkpoint.
    """
    job = make_job(tmp_path, "llama-tied", steps=STEPS, training={"evaluate_every": 6}, checkpoints={"every_steps": 4})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut = moved(job, tmp_path / "cut")
    plan = shared_plan(
        job, [2, 4], [{"cp": 2, "cp_kind": "ring", "cp_rates": (1.0, 0.4)}, {"cp": 2, "cp_kind": "all_to_all"}]
    )
    with started(tmp_path / "cut", cut, plan) as first:
        first.wait_for_step(6)
        os.kill(first.processes[1].pid, signal.SIGKILL)
        assert first.wait()[1] == -signal.SIGKILL
    assert first.log(1).startswith("rank 1: layers 0 to 1 in cluster a, context-parallel rank 1 of 2")
    assert told(first) == pytest.approx(alone.losses()[: len(told(first))], rel=1e-4)
    second = run_job(tmp_path / "cut", cut, shared_plan(job, [1, 4], [{}, {"cp": 2, "tp": 2}]), attempt=2)
    check_resumed(cut, second, alone)


def test_a_rank_that_shares_sequences_is_replaced_in_place(tmp_path: Path) -> None:
    """Its process is killed, another takes its place, the others keep theirs: the losses have the same bits."""
    job = make_job(tmp_path, "qwen3", steps=30)
    plan = shared_plan(job, [4], [{"cp": 2, "cp_kind": "ring"}])
    straight = run_job(tmp_path / "straight", moved(job, tmp_path / "straight"), plan)
    hit = tmp_path / "hit"
    with started(hit, moved(job, hit), plan, program="supervisor") as workers:
        workers.wait_for_step(3)
        workers.kill_under_supervisor(1)
        assert workers.wait() == [0, 0]
    steps = {one.step: one.values["loss"] for one in workers.metrics(0)}
    assert [steps[step] for step in range(30)] == told(straight)


def test_shared_sequences_and_replicas_on_plain_gloo(tmp_path: Path) -> None:
    """torch's own gloo serves as well, with ZeRO over the ranks that share sequences: the loss of one process."""
    job = make_job(tmp_path, "mixtral", steps=3)
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    plan = shared_plan(job, [4], [{"cp": 4}], "aa").model_copy(update={"zero": 1})
    workers = run_job(tmp_path / "cut", moved(job, tmp_path / "cut"), plan, backend="gloo")
    assert told(workers) == pytest.approx(alone.losses(), rel=1e-4)
