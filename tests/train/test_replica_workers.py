"""Rules of replicas whose ranks are processes in two clusters, joined by the transport."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from isthmus.core.errors import PeerError
from isthmus.train.process.verify import verify
from tests.train.replica_threads import Cut, make_plan
from tests.train.test_worker import moved
from tests.train.worker_jobs import Workers, make_job, run_job, started, whole

STEPS = 10
TWO = (
    Cut(ends=[1, 4], clusters="ab", micro_batches=3, size=2),
    Cut(ends=[4], clusters="b", micro_batches=2, size=1),
)
OTHER = (
    Cut(ends=[3, 4], clusters="aa", micro_batches=4, size=1),
    Cut(ends=[2, 4], clusters="ba", micro_batches=2, size=2),
)


def told(workers: Workers, rank: int, key: str = "loss") -> list[float]:
    """Return what a rank reported of `key`."""
    return [one.values[key] for one in workers.metrics(rank) if key in one.values]


@pytest.mark.slow
def test_replicas_in_two_clusters_train_what_one_process_trains(tmp_path: Path) -> None:
    """Two unlike replicas give loss, held-out loss and result of one process, also killed and resumed.

    1. One process trains 10 steps. 2. Two replicas, of two stages and one, that share their updates in the
    cluster where both are (ZeRO-1), train until a rank is killed. 3. The others end and name it. 4. Other
    cuts, without ZeRO, go on from the newest checkpoint.
    """
    training = {"evaluate_every": 5, "evaluate_samples": 5}
    job = make_job(tmp_path, "llama-tied", steps=STEPS, training=training, checkpoints={"every_steps": 3})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut, plan = moved(job, tmp_path / "cut"), make_plan(TWO, job.training.sequence_length, zero=1)
    with started(tmp_path / "cut", cut, plan) as first:
        first.wait_for_step(5)
        os.kill(first.processes[2].pid, signal.SIGKILL)
        assert first.wait() == [PeerError.exit_code, PeerError.exit_code, -signal.SIGKILL]
    assert first.log(2).startswith("rank 2: layers 0 to 3 in cluster b, replica 1 of 2")
    assert told(first, 1) == pytest.approx(alone.losses()[: len(told(first, 1))], rel=1e-4)
    assert told(first, 0) == told(first, 2) == [], "one rank tells the loss"
    other = make_plan(OTHER, job.training.sequence_length)
    second = run_job(tmp_path / "cut", cut, other, attempt=2)
    resumed = STEPS - len(told(second, 1))
    assert resumed in (3, 6, 9)
    assert told(second, 1) == pytest.approx(alone.losses()[resumed:], rel=1e-4)
    assert told(second, 1, "validation_loss")[-1] == pytest.approx(alone.losses("validation_loss")[-1], rel=1e-4)
    assert verify(cut)["loss"] == pytest.approx(alone.losses("validation_loss")[-1], rel=1e-4)


@pytest.mark.slow
def test_a_replica_is_replaced_in_place(tmp_path: Path) -> None:
    """Of three, two of them in one cluster, one is killed and started anew: the losses are undisturbed."""
    job = make_job(tmp_path, "llama", steps=20)
    cuts = [Cut(ends=[4], clusters=one, micro_batches=num, size=2) for one, num in zip("aab", (1, 1, 2), strict=True)]
    plan = make_plan(cuts, job.training.sequence_length)
    straight = run_job(tmp_path / "straight", moved(job, tmp_path / "straight"), plan)
    hit = tmp_path / "hit"
    with started(hit, moved(job, hit), plan, program="supervisor") as workers:
        workers.wait_for_step(3)
        workers.kill_under_supervisor(1)
        assert workers.wait() == [0, 0, 0]
    assert "rank 1 restarted: restart 1" in workers.log(1)
    (teller,) = [rank for rank in range(3) if told(workers, rank)]
    steps = {one.step: one.values["loss"] for one in workers.metrics(teller) if "loss" in one.values}
    assert [steps[step] for step in range(20)] == told(straight, teller)
