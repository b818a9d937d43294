"""How often a rank snapshots its state to memory, in one copy shared over replicas, and what a loss then costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isthmus.core.job import CheckpointConfig
from isthmus.core.plan import Plan
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.recovery.snapshot_interval import MAX_COST_SHARE, MAX_INTERVAL, SnapshotInterval
from tests.train.replica_threads import Replicas, make_plan
from tests.train.small_models import write_config
from tests.train.test_replicas import LENGTH, UNLIKE, make_training
from tests.train.threads import training_threads
from tests.train.worker_jobs import make_job, run_job, started
from tests.train.worker_jobs import make_plan as make_worker_plan


@given(every=st.integers(1, 9), num_steps=st.integers(1, 60), first=st.integers(0, 50))
def test_a_number_of_steps_is_kept(every: int, num_steps: int, first: int) -> None:
    """The state at the start of a group of ranks, and from there each n-th, whatever a snapshot costs."""
    interval, taken = SnapshotInterval(every), list[int]()
    for step in range(first, first + num_steps):
        if interval.is_due(step):
            interval.begin(step)
            taken.append(step)
        interval.add_step(10.0, 0.1)
    assert taken == list(range(first, first + num_steps, every))
    interval.restart()
    assert interval.is_due(first)


@given(cost_s=st.floats(0, 10), step_s=st.floats(1e-3, 10))
def test_auto_costs_its_share_at_most(cost_s: float, step_s: float) -> None:
    """Over a long run training waits for snapshots in 1 % of its time, or they come every 1,000 steps."""
    interval, num_taken, num_steps = SnapshotInterval("auto"), 0, 4000
    for step in range(num_steps):
        is_due = interval.is_due(step)
        if is_due:
            interval.begin(step)
            num_taken += 1
        interval.add_step(cost_s if is_due else 0.0, step_s)
    share = num_taken * cost_s / (num_steps * step_s)
    assert share <= 2 * MAX_COST_SHARE + 2 * cost_s / (num_steps * step_s) or interval.steps == MAX_INTERVAL
    assert cost_s > 0 or num_taken == num_steps


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "often"])
def test_another_interval_is_refused(wrong: Any) -> None:
    """The field takes a number of steps from 1 on, or `auto`."""
    with pytest.raises(ValidationError, match="memory_interval"):
        CheckpointConfig(memory_interval=wrong)
    assert CheckpointConfig(memory_interval="auto").memory_interval == "auto"


def test_one_copy_stays_once_all_ranks_have_the_newer(tmp_path: Path) -> None:
    """The older of two snapshots gives its memory back; a lone one stays, and the next one finds room again."""
    memory = MemoryCheckpoint("r", 0, tmp_path)
    state = {"weight": torch.arange(4096.0)}
    memory.begin_snapshot(3, 3, state)
    memory.release_older()
    assert memory.steps() == (3,)
    memory.begin_snapshot(6, 6, state)
    memory.release_older()
    assert memory.steps() == (3, 6)
    both = sum(one.stat().st_size for one in tmp_path.rglob("*.data"))
    memory.release_older()
    assert memory.steps() == (6,)
    assert sum(one.stat().st_size for one in tmp_path.rglob("*.data")) == both // 2
    assert torch.equal(MemoryCheckpoint("r", 0, tmp_path).load(6).tensors["weight"], state["weight"])
    memory.begin_snapshot(9, 9, state)
    assert memory.steps() == (6, 9)


@pytest.mark.integration
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("zero", "precision"), [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16")])
def test_replicas_of_a_cluster_share_a_snapshot(zero: int, precision: str, tmp_path: Path) -> None:
    """Each row of weights and moments is in the snapshot of one rank of a cluster, and comes back to all, bit by bit.

    Six ranks of three unlike replicas in two clusters: train, snapshot, train on, go back, train on: the same results.
    """
    model = write_config(tmp_path, "llama-tied")
    plan = make_plan(UNLIKE, LENGTH, zero=zero)
    replicas = Replicas(model, plan, make_training(steps=6, precision=precision))
    try:
        replicas.train(2)
        states = [{name: one.clone() for name, one in rank.optimizer.local_state().items()} for rank in replicas.ranks]
        expected = replicas.train(2)
        weights = [{name: one.clone() for name, one in replicas.weights(rank).items()} for rank in range(6)]
        with training_threads(6) as pool:
            pairs = zip(replicas.ranks, states, strict=True)
            for one in [pool.submit(rank.optimizer.load_local_state, state) for rank, state in pairs]:
                one.result(60)
        assert replicas.train(2) == expected
        for rank in range(6):
            assert all(torch.equal(one, weights[rank][name]) for name, one in replicas.weights(rank).items())
        for cluster in "ab":
            ranks = [rank for rank, other in enumerate(plan.rank_clusters) if other == cluster]
            sizes = {name: one.numel() for rank in ranks for name, one in replicas.weights(rank).items()}
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                kept = [one for rank in ranks for name, one in states[rank].items() if name.startswith(f"{kind}/")]
                assert sum(one.numel() for one in kept) == sum(sizes.values())
    finally:
        replicas.close()


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_last_snapshot(tmp_path: Path) -> None:
    """Snapshots every 4 steps, of two replicas in one cluster: the same losses as undisturbed.

    1. Train until a rank of the second replica is killed after a step between two snapshots. 2. Its supervisor starts
    another process, which gets what the first replica's ranks led. 3. All repeat the steps since the last snapshot.
    """
    changes: dict[str, Any] = {"checkpoints": {"memory_interval": 4}}
    job = make_job(tmp_path, steps=14, **changes)
    stages = make_worker_plan(job, [2, 4], "aa").stages
    replicas = [one.model_copy(update={"replica": number}) for number in (0, 1) for one in stages]
    plan = make_worker_plan(job, [2, 4], "aa").model_copy(
        update={"stages": tuple(replicas), "dp": 2, "micro_batches": 2, "overlap_gradients": True}
    )
    plan = Plan.model_validate(plan.model_dump())
    expected = {one.step: one.values["loss"] for one in run_job(tmp_path / "whole", job, plan).metrics(1)}
    other = make_job(tmp_path / "other", steps=14, **changes)
    with started(tmp_path / "killed", other, plan, program="supervisor") as killed:
        killed.wait_for_step(6)
        (process,) = psutil.Process(killed.processes[2].pid).children()
        process.kill()
        assert killed.wait() == [0] * 4
    found = {one.step: one.values["loss"] for one in killed.metrics(1)}
    assert found == expected
    assert "restart 1 of" in killed.log(2)
    repeated = max(one.values.get("repeated_steps") or 0 for one in killed.metrics(0))
    assert repeated <= 4, "none where the kill hits a snapshot"
