"""Rules of local steps in processes: replica groups in two clusters are killed, replaced and resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from isthmus.core.job import Job
from isthmus.core.plan import Plan
from isthmus.train.process.verify import verify
from tests.train.replica_threads import Cut, make_plan
from tests.train.test_tensor_workers import told
from tests.train.test_worker import moved
from tests.train.worker_jobs import make_job, run_job, started, whole

pytestmark = pytest.mark.slow

STEPS, EVERY = 11, 3
GROUPS = (
    Cut(ends=[1, 4], clusters="aa", micro_batches=2, size=2),
    Cut(ends=[4], clusters="b", micro_batches=2, size=2),
)


def job_of(folder: Path) -> Job:
    training = {"local_steps": EVERY, "evaluate_every": 4, "evaluate_samples": 6}
    return make_job(folder, "llama-tied", steps=STEPS, training=training, checkpoints={"every_steps": 4})


def plan_of(job: Job) -> Plan:
    return make_plan(GROUPS, job.training.sequence_length, local_steps=EVERY, zero=1)


def test_groups_are_resumed_between_averages_with_the_same_bits(tmp_path: Path) -> None:
    """A rank is killed; the same plan repeats the straight run, and one process goes on from the mean of the groups.

    1. A run of 11 steps, averages after 3, 6, 9 and the last, checkpoints after 4 and 8. 2. Its export has the
    held-out loss of its last step: both groups ended with one model. 3. The same run, killed, resumes with its bits.
    4. One process resumes from a checkpoint between averages: its loss is near, since groups do not go far apart.
    """
    job = job_of(tmp_path)
    straight = run_job(tmp_path / "straight", mine := moved(job, tmp_path / "straight"), plan_of(job))
    losses = told(straight)
    assert losses[-1] < losses[0]
    assert verify(mine)["loss"] == pytest.approx(told(straight, "validation_loss")[-1], rel=1e-4)
    for name, plan in (("same", plan_of(job)), ("mean", whole(job))):
        cut = moved(job, tmp_path / name)
        with started(tmp_path / name, cut, plan_of(job)) as first:
            first.wait_for_step(5)
            os.kill(first.processes[2].pid, signal.SIGKILL)
            first.wait()
        second = run_job(tmp_path / name, cut, plan, attempt=2)
        resumed = STEPS - len(told(second))
        assert resumed in (4, 8)
        expected = losses[resumed:]
        assert told(second) == (expected if name == "same" else pytest.approx(expected, rel=0.1))


def test_a_rank_is_replaced_in_place_between_averages(tmp_path: Path) -> None:
    """Its process is killed, another takes its place from the snapshot in memory: the losses have the same bits."""
    job = make_job(tmp_path, "llama", steps=30, training={"local_steps": 8})
    plan = make_plan(GROUPS, job.training.sequence_length, local_steps=8)
    straight = run_job(tmp_path / "straight", moved(job, tmp_path / "straight"), plan)
    hit = tmp_path / "hit"
    with started(hit, moved(job, hit), plan, program="supervisor") as workers:
        workers.wait_for_step(3)
        workers.kill_under_supervisor(2)
        assert workers.wait() == [0, 0, 0]
    (teller,) = [rank for rank in range(3) if any("loss" in one.values for one in workers.metrics(rank))]
    steps = {one.step: one.values["loss"] for one in workers.metrics(teller) if "loss" in one.values}
    assert [steps[step] for step in range(30)] == told(straight)
