"""Rules of `compute: virtual`: a stage waits instead of computing, and what it sends is as large as real."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.comm.group.group_work import SendWork
from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import VerifiedCheckpoint
from isthmus.core.messages.worker_folder import CheckpointRequest, WorkerFolder, WorkerSpec
from isthmus.core.model import load_model
from isthmus.core.plan import Plan, StageTime
from isthmus.plan import profile_model
from isthmus.schedule import make_schedule
from isthmus.train.communication.communicator import Communicator
from isthmus.train.model.virtual_compute_stage import VirtualComputeStage
from isthmus.train.pipeline.virtual_training import BlockingCommunicator
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.update.virtual_gradients import virtual_held_rows
from tests.comm.relay import Relay
from tests.train.small_models import NUM_LAYERS
from tests.train.worker_jobs import Workers, make_job, make_plan, run_job, started

TIME = StageTime(forward_s=0.02, backward_s=0.04, update_s=0.05)


def virtual_job(folder: Path, variant: str = "llama", **changes: Any) -> Job:
    """Return a job that is rehearsed; its data do not exist."""
    job = make_job(folder, variant, compute="virtual", **changes)
    return job.model_copy(update={"data": job.data.model_copy(update={"paths": ("/nowhere/at/all",)})})


def virtual_plan(job: Job, ends: list[int], clusters: str, **changes: Any) -> Plan:
    plan = make_plan(job, ends, clusters, **changes)
    return Plan.model_validate(plan.model_dump() | {"compute": "virtual"})


def stage_of(layers: tuple[int, int]) -> VirtualComputeStage:
    return VirtualComputeStage(layers, 6, 8, dtype=torch.bfloat16, device=torch.device("cpu"))


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 4), size=st.integers(1, 3), tokens=st.integers(1, 9))
def test_a_stage_keeps_shapes_and_allocates_once(first: int, size: int, tokens: int) -> None:
    """[B, S] or [B, S, H] in, [B, S, H] out and back, all in one piece of memory whatever the micro-batch."""
    stage = stage_of((first, 5))
    for _ in range(3):
        x = torch.zeros(size, tokens, dtype=torch.int64) if first == 0 else torch.ones(size, tokens, 8).bfloat16()
        out, balance = stage.compute(x.requires_grad_(first > 0))
        assert balance is None
        assert (out.shape, out.dtype) == ((size, tokens, 8), torch.bfloat16)
        torch.autograd.backward(out, torch.ones_like(out))
        memory = {out.data_ptr()}
        if first > 0:
            assert x.grad is not None
            assert x.grad.shape == x.shape
            memory.add(x.grad.data_ptr())
        assert memory == {stage.zeros((1,)).data_ptr()}


def test_a_stage_has_no_weights() -> None:
    """Whatever the model, a virtual stage holds a single number, at which autograd begins."""
    assert sum(one.numel() for one in stage_of((0, 6)).parameters()) == 1


def test_the_last_stage_hands_on_a_loss_that_costs_nothing() -> None:
    """A micro-batch of the last stage ends in one number a sample, and its gradient in a hidden state."""
    out, _ = stage_of((4, 6)).compute(torch.ones(2, 5, 8).bfloat16().requires_grad_())
    assert out.shape == (2, 1, 1)


def test_a_stage_of_any_degrees_is_one_process(tmp_path: Path) -> None:
    """A virtual plan has a rank per stage and still counts all chips; a real one has a rank per share."""
    job = virtual_job(tmp_path)
    plan = virtual_plan(job, [2, 4], "ab", stage={"tp": 8, "cp": 2})
    real = Plan.model_validate(plan.model_dump() | {"compute": "real"})
    assert (len(plan.ranks), len(real.ranks)) == (2, 32)
    assert [part.ranks for part in plan.parts()] == [(0,), (1,)]
    assert plan.parts()[0].chips == real.parts()[0].chips == {"cpu": 16}


def spec_of(tmp_path: Path, rank: int = 0, time: StageTime | None = TIME, **of_plan: Any) -> WorkerSpec:
    job = virtual_job(tmp_path)
    plan = virtual_plan(job, [2, 4], "ab").model_dump() | of_plan
    return WorkerSpec(run="r", attempt=1, rank=rank, job=job, plan=Plan.model_validate(plan), stage_time=time)


def two_replicas(clusters: str) -> list[dict[str, Any]]:
    """Return the stages of two replicas of two stages each; `clusters` has the place of each."""
    cuts = [(0, 2), (2, NUM_LAYERS)] * 2
    return [
        {"replica": i // 2, "cluster": cluster, "node_group": "cpu", "layers": cut, "tp": 4, "sp": True}
        for i, (cluster, cut) in enumerate(zip(clusters, cuts, strict=True))
    ]


APART = {"stages": two_replicas("aabb"), "dp": 2, "micro_batches": 2}


def test_degrees_that_the_runtime_lacks_can_be_rehearsed(tmp_path: Path) -> None:
    """Tensor parallelism, recomputation, ZeRO and uneven replicas inside a cluster are a matter of time."""
    stages = two_replicas("abab")
    spec = spec_of(
        tmp_path, 3, stages=stages, dp=2, zero=1, micro_batches=3, replica_micro_batches=(3, 1),
        transport="rendezvous",
    )  # fmt: skip
    assert check_plan_supported(spec) == make_schedule("1f1b", 2, 1)
    fixed = {"micro_batches": 2, "zero": 3, "overlap_gradients": True}
    inside = spec_of(tmp_path, stages=two_replicas("abab"), dp=2, **fixed)
    assert check_plan_supported(inside) == make_schedule("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"time": None}, "predicts no stage time"),
        ({"compute": "real"}, "compute is real in the plan and virtual in the job"),
        ({"micro_batches": 5}, "samples a step is 10"),
        ({"schedule": "overlapped", "warm_up": (0, 1)}, "increase"),
        ({"schedule": "gpipe", "warm_up": (1, 0)}, "does not accept warm_up"),
        ({"precision": "bf16"}, "precision is bf16 in the plan and fp32 in the job"),
        (APART | {"zero": 2}, "fixes zero to 2, with replicas in several clusters"),
        (APART | {"overlap_gradients": True}, "fixes overlap_gradients to True"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(tmp_path: Path, fixed: dict[str, Any], words: str) -> None:
    """No time, a plan of another kind, other samples, a schedule that does not go with the plan."""
    with pytest.raises(PlanError, match=words):
        check_plan_supported(spec_of(tmp_path, **fixed))


def test_a_real_job_takes_no_virtual_plan(tmp_path: Path) -> None:
    """A plan made for a rehearsal trains nothing."""
    spec = spec_of(tmp_path)
    real = spec.model_copy(update={"job": spec.job.model_copy(update={"compute": "real"})})
    with pytest.raises(PlanError, match="compute is virtual in the plan and real in the job"):
        check_plan_supported(real)


def names_by_rank(plan: Plan, tied: bool = False) -> list[set[str]]:
    return [{one.name for one in of_rank} for of_rank in virtual_held_rows(plan, lambda _: 1, tied)]


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(1, 4), st.text("abc", min_size=2, max_size=2)), min_size=2, max_size=4))
def test_gradients_are_shared_by_one_rank_of_each_cluster(cuts: list[tuple[int, str]]) -> None:
    """What several clusters hold, one rank of each answers for; what one holds alone, none."""
    stages = [
        {"replica": r, "cluster": cluster, "node_group": "cpu", "layers": layers}
        for r, (cut, clusters) in enumerate(cuts)
        for cluster, layers in zip(clusters, ((0, cut), (cut, 5)), strict=True)
    ]
    fixed = {"id": "p", "dp": len(cuts), "micro_batches": 1, "micro_batch_size": 1, "sequence_length": 1}
    plan = Plan.model_validate({"stages": stages, "compute": "virtual", **fixed})
    names = names_by_rank(plan)
    for layer in range(5):
        holders = [r for r in range(len(plan.ranks)) if layer in range(*plan.stage_of(r).layers)]
        places = {plan.rank_clusters[rank] for rank in holders}
        sharing = [rank for rank in holders if str(layer) in names[rank]]
        assert len(sharing) == (len(places) if len(places) > 1 else 0)
        assert {plan.rank_clusters[rank] for rank in sharing} in (places, set())
        assert not any(str(layer) in names[rank] for rank in range(len(names)) if rank not in holders)


def test_a_tied_embedding_is_shared_by_both_ends(tmp_path: Path) -> None:
    """The last stage has no head of its own then, and adds its gradient to that of the first."""
    plan = virtual_plan(virtual_job(tmp_path), [2, 3, 4], "aba")
    assert names_by_rank(plan, tied=True) == [{"embedding"}, {"embedding"}, set()]
    assert names_by_rank(plan) == [set(), set(), set()]


def test_with_rendezvous_a_send_is_waited_for() -> None:
    """A sender goes on once the receiver has the message, as with exchanges that block; else at once."""
    arrived: Future[None] = Future()
    work = SendWork(arrived, "send", torch.zeros(1))
    Communicator(["a", "b"], 0).wait(work)
    exchange = BlockingCommunicator(["a", "b"], 0)
    waiting = threading.Thread(target=exchange.wait, args=(work,))
    waiting.start()
    assert waiting.is_alive()
    arrived.set_result(None)
    waiting.join(5)
    assert not waiting.is_alive()


def steps_s(workers: Workers) -> list[float]:
    """Return the seconds of every step but the first, as rank 0 saw them."""
    return [one.values["step_s"] or 0.0 for one in workers.metrics(0)[1:]]


@pytest.mark.slow
def test_workers_rehearse_a_job(tmp_path: Path) -> None:
    """Two replicas of two stages in two clusters run in the time of the plan, and leave nothing but figures.

    1. Four processes, each a stage of four chips, meet through a proxy; none reads the data, which does not
    exist. 2. A step takes no less than its pipeline and its update. 3. What a sender reports is what crossed.
    4. No loss, no checkpoint, no model.
    """
    job = virtual_job(tmp_path, steps=3, training={"precision": "bf16", "sequence_length": 64})
    fixed = {"stages": two_replicas("abab"), "dp": 2, "micro_batches": 2, "replica_micro_batches": (2, 2)}
    plan = Plan.model_validate(virtual_plan(job, [2, 4], "ab").model_dump() | fixed)
    with Relay() as relay:
        routes = dict.fromkeys("ab", relay.address)
        workers = run_job(tmp_path, job, plan, stage_time=TIME, routes=routes, trace_steps=(1,))
        assert relay.num_carried > 0
    assert min(steps_s(workers)) >= 3 * (TIME.forward_s + TIME.backward_s) + TIME.update_s
    hidden = 16
    for rank in range(4):
        for one in workers.metrics(rank):
            assert one.values["wan_bytes"] == 2 * (2 * 64 * hidden) * 2
            assert not {"loss", "gradient_norm", "learning_rate"} & set(one.values)
    assert "virtual: sleeps instead of computing" in workers.log(0)
    assert "step 3 of 3" in workers.log(2)
    assert not (tmp_path / "output").exists()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_gradients_that_cross_clusters_are_sent(tmp_path: Path, schedule: str) -> None:
    """Replicas, or copies, that hold a layer in two clusters send its gradient: 4 bytes for each number."""
    job = virtual_job(tmp_path, steps=2, training={"precision": "bf16"})
    plan = virtual_plan(job, [2, 4], "ab", schedule=schedule)
    if schedule == "1f1b":
        fixed = {"stages": two_replicas("abba"), "dp": 2, "micro_batches": 2}
        plan = Plan.model_validate(plan.model_dump() | fixed)
    workers = run_job(tmp_path, job, plan, stage_time=TIME)
    profile = profile_model(load_model(job.model))
    steps = [one for rank in range(len(plan.ranks)) for one in workers.metrics(rank) if one.step == 1]
    activations = 2 * 4 * (2 * 16 * 16) * 2
    assert sum(one.values["wan_bytes"] or 0 for one in steps) == activations + 2 * 4 * profile.num_parameters


@pytest.mark.slow
def test_replica_groups_send_what_they_average_every_few_steps(tmp_path: Path) -> None:
    """With two local steps nothing crosses in the first; in the second, and in the last, all parameters do."""
    job = virtual_job(tmp_path, steps=3, training={"precision": "bf16", "local_steps": 2})
    plan = Plan.model_validate(virtual_plan(job, [2, 4], "ab").model_dump() | APART | {"local_steps": 2})
    workers = run_job(tmp_path, job, plan, stage_time=TIME)
    sent = [
        sum(one.values["wan_bytes"] or 0 for rank in range(4) for one in workers.metrics(rank) if one.step == step)
        for step in range(3)
    ]
    whole = 2 * 4 * profile_model(load_model(job.model)).num_parameters
    assert sent == [0, whole, whole]


@pytest.mark.slow
def test_a_rehearsal_that_is_asked_for_protection_has_nothing_to_protect(tmp_path: Path) -> None:
    """An agent that wants the work saved is answered at the end of the step: nothing was learned, 0 bytes."""
    job = virtual_job(tmp_path, "llama-tied", steps=10_000)
    with started(tmp_path, job, virtual_plan(job, [2, 4], "aa"), stage_time=TIME) as workers:
        workers.wait_for_step(1)
        workers.folders[1].write_checkpoint_request(CheckpointRequest(after=0))
        answers: list[VerifiedCheckpoint | None] = [None]
        while None in answers:
            assert all(one.poll() is None for one in workers.processes), workers.log(0)
            answers = [WorkerFolder(one.path).read_verified_checkpoint() for one in workers.folders]
    assert {one.num_bytes for one in answers if one} == {0}
    assert len({one.step for one in answers if one}) == 1
