"""Rules of stages shared by processes: they train, save and export what one process does."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import PeerError, PlanError
from isthmus.core.job import Job
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.plan import Plan
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.process.verify import verify
from tests.train.test_worker import moved
from tests.train.worker_jobs import Workers, make_job, make_plan, run_job, started, whole

STEPS = 12


def shared_plan(job: Job, ends: Sequence[int], stages: Sequence[dict[str, Any]], clusters: str = "ab") -> Plan:
    """Return a plan whose stages end at the layers `ends`, each changed as `stages` says."""
    plan = make_plan(job, ends, clusters)
    changed = [one.model_copy(update=change) for one, change in zip(plan.stages, stages, strict=True)]
    return plan.model_copy(update={"stages": tuple(changed)})


def told(workers: Workers, key: str = "loss") -> list[float]:
    """Return what was reported of `key`; one rank alone does."""
    found = [
        [one.values[key] for one in workers.metrics(rank) if key in one.values] for rank in range(len(workers.folders))
    ]
    (only,) = [of_rank for of_rank in found if of_rank]
    return only


def check_resumed(cut: Job, second: Workers, alone: Workers) -> None:
    """Of 12 steps with a checkpoint every 4: the second attempt goes on as the run `alone` does, also its export."""
    resumed = len(alone.losses()) - len(told(second))
    assert resumed in (4, 8)
    assert told(second) == pytest.approx(alone.losses()[resumed:], rel=1e-4)
    held_out = alone.losses("validation_loss")[-1]
    assert told(second, "validation_loss")[-1] == pytest.approx(held_out, rel=1e-4)
    assert verify(cut)["loss"] == pytest.approx(held_out, rel=1e-4)


@pytest.mark.slow
def test_shares_in_two_clusters_train_what_one_process_trains(tmp_path: Path) -> None:
    """Loss, held-out loss and result of one process, also killed and resumed with other shares.

    1. One process trains 12 steps. 2. Two ranks that share tokens too, then one, train until the second of
    the two is killed. 3. The others end and name it. 4. One, then two, go on from the newest checkpoint.
    """
    job = make_job(tmp_path, "llama-tied", steps=STEPS, training={"evaluate_every": 6}, checkpoints={"every_steps": 4})
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    cut = moved(job, tmp_path / "cut")
    with started(tmp_path / "cut", cut, shared_plan(job, [2, 4], [{"tp": 2, "sp": True}, {}])) as first:
        first.wait_for_step(6)
        os.kill(first.processes[1].pid, signal.SIGKILL)
        assert first.wait() == [PeerError.exit_code, -signal.SIGKILL, PeerError.exit_code]
    assert first.log(1).startswith("rank 1: layers 0 to 1 in cluster a, tensor-parallel rank 1 of 2")
    assert told(first) == pytest.approx(alone.losses()[: len(told(first))], rel=1e-4)
    second = run_job(tmp_path / "cut", cut, shared_plan(job, [1, 4], [{}, {"tp": 2}]), attempt=2)
    check_resumed(cut, second, alone)
    values = second.metrics(1)[-1].values
    assert values["exposed_communication_s"] > 0
    rows_of_tied_head = 272 // 2 * 16 * 4
    assert second.metrics(2)[-1].values["wan_bytes"] == rows_of_tied_head, "the first sends for the stage"


@pytest.mark.slow
def test_a_shared_moe_trains_on_plain_gloo(tmp_path: Path) -> None:
    """torch's own gloo serves as well: experts shared by two ranks, then one: the loss of one process."""
    job = make_job(tmp_path, "mixtral", steps=3)
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole(job))
    plan = shared_plan(job, [3, 4], [{"tp": 2}, {}], "aa")
    workers = run_job(tmp_path / "cut", moved(job, tmp_path / "cut"), plan, backend="gloo")
    assert told(workers) == pytest.approx(alone.losses(), rel=1e-4)


@pytest.mark.slow
def test_a_rank_that_shares_a_stage_is_replaced_in_place(tmp_path: Path) -> None:
    """Its process is killed, another takes its place, the others keep theirs: the losses are undisturbed."""
    job = make_job(tmp_path, "qwen3", steps=30)
    plan = shared_plan(job, [2, 4], [{"tp": 2, "sp": True}, {}])
    straight = run_job(tmp_path / "straight", moved(job, tmp_path / "straight"), plan)
    hit = tmp_path / "hit"
    with started(hit, moved(job, hit), plan, program="supervisor") as workers:
        workers.wait_for_step(3)
        workers.kill_under_supervisor(1)
        assert workers.wait() == [0, 0, 0]
    assert "rank 1 restarted: restart 1" in workers.log(1)
    steps = {one.step: one.values["loss"] for one in workers.metrics(2)}
    assert [steps[step] for step in range(30)] == told(straight)


def check(tmp_path: Path, **stage: Any) -> None:
    job = make_job(tmp_path)
    plan = shared_plan(job, [1, 4], [stage, {}])
    check_plan_supported(WorkerSpec(run="j", attempt=1, rank=len(plan.ranks) - 1, job=job, plan=plan))


def test_shares_that_can_be_dealt_out_are_accepted(tmp_path: Path) -> None:
    """Two key and value heads go to two ranks, with all tokens or parts of them between blocks."""
    check(tmp_path, tp=2)
    check(tmp_path, tp=2, sp=True)


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ({"tp": 4}, "stage 0 has tp 4, which does not divide.*2 KV heads.*divides 2"),
        ({"tp": 3}, "tp 3, which does not divide .* 2 KV heads"),
        ({"sp": True}, "sequence parallelism but tp 1"),
        ({"cp": 3}, "cp 3, which does not divide 16 tokens.*nearest valid: cp 2"),
        ({"cp": 4, "cp_kind": "all_to_all"}, "cp 4 of kind all_to_all.*2 KV heads.*nearest valid: cp 2"),
        ({"ep": 2}, "ep 2, which does not divide the 1 chips .*nearest valid: ep 1"),
    ],
)
def test_shares_that_cannot_be_dealt_out_are_refused(tmp_path: Path, stage: dict[str, Any], why: str) -> None:
    """Each refusal says what cannot be run, and what to do."""
    with pytest.raises(PlanError, match=why):
        check(tmp_path, **stage)
