"""Rules of ZeRO 2 and 3: gradients and weights that ranks of a cluster share train what one process trains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.core.errors import PeerError, PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.core.model import load_model
from isthmus.core.plan import Plan
from isthmus.plan import runtime_incompatibility
from isthmus.plan.memory.plan_stage_memory import plan_stage_memory
from isthmus.plan.memory.stage_memory import end_parameters, most_in_turn
from isthmus.plan.profile.component import Sharding
from isthmus.plan.profile.model_profile import profile_model
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.train.process.verify import verify
from tests.train.replica_threads import Cut, Rank, Replicas, curve, make_plan
from tests.train.small_models import write_config
from tests.train.test_expert_training import changed
from tests.train.test_replica_workers import told
from tests.train.test_replicas import LENGTH, ONE, close, make_training
from tests.train.test_worker import moved
from tests.train.threads import LONG, training_threads
from tests.train.worker_jobs import make_job, run_job, started
from tests.train.worker_jobs import whole as whole_plan

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]

SINGLE = [Cut(ends=[4], clusters="a", micro_batches=2, size=1)] * 4
HYBRID = [Cut(ends=[4], clusters=one, micro_batches=2, size=1) for one in "aabb"]
FAR = [Cut(ends=[2, 4], clusters=one, micro_batches=4, size=1) for one in ("cb", "dd")]
PIPELINES = [Cut(ends=[2, 4], clusters="ab", micro_batches=4, size=1)] * 2
NEAR = [Cut(ends=[1, 4], clusters="aa", micro_batches=4, size=1)] * 2
UNLIKE = [
    Cut(ends=[4], clusters="a", micro_batches=2, size=1),
    Cut(ends=[4], clusters="a", micro_batches=2, size=1),
    Cut(ends=[1, 4], clusters="bb", micro_batches=1, size=2),
    Cut(ends=[1, 4], clusters="bb", micro_batches=1, size=2),
]
PAIRS = {"sharding": {"replicas": 2}}

CASES: list[tuple[str, Sequence[Cut], dict[str, Any], str]] = [
    ("llama", SINGLE, {}, "fp32"),
    ("llama-tied", HYBRID, PAIRS, "bf16"),
    ("qwen3-moe-tied-sparse", PIPELINES, {}, "fp32"),
    ("llama-tied", NEAR, {"schedule": "gpipe"}, "bf16"),
    ("llama", PIPELINES, {"schedule": "zero_bubble"}, "fp32"),
    ("llama-tied", PIPELINES, {"schedule": "interleaved", "chunks": 2}, "fp32"),
    ("llama", UNLIKE, PAIRS, "fp32"),
    ("mixtral", SINGLE, {"optimizer_on_host": True, "ep": 2}, "fp32"),
    ("qwen3-moe-tied-sparse", HYBRID, {"local_steps": 2, "ep": 2}, "bf16"),
]
MORE: list[tuple[str, Sequence[Cut], dict[str, Any], str]] = [
    ("qwen3-moe-tied-sparse", NEAR, {"ep": 2, "schedule": "zero_bubble"}, "bf16"),
    ("mixtral", PIPELINES, {"ep": 2, "schedule": "interleaved", "chunks": 2}, "fp32"),
    ("llama", HYBRID, {**PAIRS, "local_steps": 2}, "fp32"),
]
"""Cases of `--whole`."""


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("variant", "cuts", "changes", "precision"), [*CASES, *MORE])
def test_sharded_replicas_train_what_whole_ones_train(
    variant: str, cuts: Sequence[Cut], changes: dict[str, Any], precision: str, zero: int, whole: bool, tmp_path: Path
) -> None:
    """Losses and norms are those of replicas without ZeRO, for any schedule; a second run has the same bits.

    With experts that ranks share, and with groups that average every two steps, too.
    """
    if not whole and (variant, cuts, changes, precision) in MORE:
        pytest.skip("tried with --whole")
    model, training = write_config(tmp_path, variant), make_training(steps=3, precision=precision)
    plan = make_plan(cuts, LENGTH, zero=zero, **{name: one for name, one in changes.items() if name != "ep"})
    plan = changed(plan, ep=changes.get("ep", 1))
    assert runtime_incompatibility(plan) is None
    found = curve(model, plan, training, bucket_elements=128)
    expected = curve(model, plan.model_copy(update={"zero": 0}), training)
    close(found, expected, 1e-5 if precision == "fp32" else 2e-3)
    assert curve(model, plan, training, bucket_elements=128) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "cuts", "changes", "zero", "sampled"),
    [
        ("qwen3-tied-window", HYBRID, PAIRS, 2, False),
        ("qwen3-moe-tied-sparse", PIPELINES, {}, 2, True),
        ("llama-tied", HYBRID, PAIRS, 3, True),
        ("qwen3-moe-tied-sparse", PIPELINES, {}, 3, False),
    ],
)
def test_the_curves_of_200_steps_agree(
    variant: str,
    cuts: Sequence[Cut],
    changes: dict[str, Any],
    zero: int,
    sampled: bool,
    steps_of: Callable[[bool], int],
    tmp_path: Path,
) -> None:
    """With one process to 1e-4 at each of 200 steps; fewer in a run of the tests."""
    model, training, steps = write_config(tmp_path, variant), make_training(steps=LONG), steps_of(sampled)
    alone = curve(model, make_plan([ONE], LENGTH), training, steps)
    close(curve(model, make_plan(cuts, LENGTH, zero=zero, **changes), training, steps), alone, 1e-4)


def gradient_bytes(rank: Rank) -> int:
    """Return the bytes of the gradients that a rank holds, of the model's parameters and of what it updates."""
    groups = rank.optimizer.adam.param_groups
    held = [one.grad for group in groups for one in group["params"]]
    held += [rank.optimizer.gradient(name) for name, _ in rank.pieces.global_named_parameters()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held if one is not None}
    return sum(storages.values())


def held_at_update(model: Path, plan: Plan, precision: str) -> list[int]:
    """Train a step; return by rank the bytes of gradients at the update."""
    replicas = Replicas(model, plan, make_training(steps=1, precision=precision), bucket_elements=32)
    found = [0] * len(replicas.ranks)

    def watch(number: int, rank: Rank) -> None:
        def note(*_: object) -> None:
            found[number] = gradient_bytes(rank)

        rank.optimizer.adam.register_step_pre_hook(note)

    for number, rank in enumerate(replicas.ranks):
        watch(number, rank)
    try:
        replicas.train(1)
        return found
    finally:
        replicas.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cuts", [SINGLE, PIPELINES])
def test_gradients_take_the_memory_that_the_planner_counts(cuts: Sequence[Cut], precision: str, tmp_path: Path) -> None:
    """The bytes of gradients that each rank holds at the update are those of the memory model, to 2 %."""
    model = write_config(tmp_path, "llama")
    profile = profile_model(load_model(model))
    for zero in (0, 2, 3):
        plan = make_plan(cuts, LENGTH, zero=zero, precision=precision)
        found = held_at_update(model, plan, precision)
        for rank, num_bytes in enumerate(found):
            stages = plan.pipeline(plan.stage_of(rank).replica)
            place = plan.ranks[rank].stage % len(stages)
            expected = plan_stage_memory(plan, profile, stages, place).gradients_bytes
            assert num_bytes == pytest.approx(expected, rel=0.02), (zero, rank)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("variant", "cuts"), [("llama", SINGLE), ("llama-tied", SINGLE), ("llama", PIPELINES)])
def test_weights_take_the_memory_that_the_planner_counts(
    variant: str, cuts: Sequence[Cut], precision: str, tmp_path: Path
) -> None:
    """ZeRO 3: the rows that a rank keeps, and the most that it has gathered, are those of the memory model, to 2 %.

    Between steps nothing is gathered. Gathered again, all ranks of a stage have the same weights.
    """
    model, each = write_config(tmp_path, variant), 4 if precision == "fp32" else 2
    profile = profile_model(load_model(model))
    plan = make_plan(cuts, LENGTH, zero=3, precision=precision)
    replicas = Replicas(model, plan, make_training(steps=1, precision=precision), bucket_elements=32)
    try:
        replicas.train(1)
        gatherers = [one.optimizer.gatherer for one in replicas.ranks]
        assert [one.num_bytes for one in gatherers] == [0] * len(gatherers)
        with training_threads(len(gatherers)) as pool:
            for waiting in [pool.submit(one.optimizer.gather_weights) for one in replicas.ranks]:
                waiting.result(60)
        whole = {}
        for rank, one in enumerate(replicas.ranks):
            stages = plan.pipeline(plan.stage_of(rank).replica)
            place = plan.ranks[rank].stage % len(stages)
            expected = plan_stage_memory(plan, profile, stages, place)
            assert one.optimizer.gatherer.kept_bytes == pytest.approx(expected.weights_bytes, rel=0.02)
            parts = [sum(part.parameters for part in layer.components) for layer in profile.layers]
            if one.optimizer.by_layer is None:
                assert one.optimizer.gatherer.num_bytes == each * sum(
                    w.numel() for w in replicas.weights(rank).values()
                )
            else:
                table, head = end_parameters(profile, Sharding())
                most = each * most_in_turn([table, *parts, head], 2)
                assert one.optimizer.by_layer.most_bytes == pytest.approx(most, rel=0.02)
            for name, weight in replicas.weights(rank).items():
                assert torch.equal(whole.setdefault(name, weight), weight), (rank, name)
    finally:
        replicas.close()


@pytest.mark.parametrize("kind", ["full", "selective", "moe"])
def test_recomputed_layers_have_their_weights_again(kind: str, tmp_path: Path) -> None:
    """With ZeRO 3 a layer that is computed again in its backward pass gives the same bits."""
    model, training = write_config(tmp_path, "qwen3-moe"), make_training(steps=2)
    plan = make_plan(SINGLE, LENGTH, zero=3)
    stages = tuple(one.model_copy(update={"recompute": kind}) for one in plan.stages)
    assert curve(model, plan.model_copy(update={"stages": stages}), training) == curve(model, plan, training)


@pytest.mark.parametrize(
    ("cuts", "changes", "message"),
    [
        (HYBRID, {}, "shards over 4 replicas .dp 4 without sharding.replicas., and cluster a has layers .0, 4. of 2"),
        (HYBRID, {"sharding": {"replicas": 4}}, "shards over 4 replicas .sharding.replicas 4., and cluster a"),
        ([PIPELINES[0], *FAR], {"local_steps": 2}, "shards over 2 replicas .dp 2 without .*, and cluster a .* of 1"),
        (SINGLE, PAIRS, "shards over 2 replicas .sharding.replicas 2., and cluster a has layers .0, 4. of 4"),
        (PIPELINES, {"schedule": "dualpipe"}, "schedule dualpipe holds two copies"),
        ([SINGLE[0], Cut(ends=[4], clusters="a", micro_batches=1, size=2)], {}, "they run 2 and 1 micro-batches"),
        ([NEAR[0], SINGLE[0]], {}, "unlike layers or places"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_start(
    cuts: Sequence[Cut], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Groups over clusters or in parts of one, two copies of a layer, replicas that work in another order."""
    job = make_job(tmp_path)
    for zero in (2, 3):
        plan = make_plan(cuts, job.training.sequence_length, zero=zero, **changes)
        fields = {"global_batch_size": plan.num_samples, "local_steps": plan.local_steps}
        batch = job.training.model_copy(update=fields)
        spec = WorkerSpec(run="r", attempt=1, rank=0, job=job.model_copy(update={"training": batch}), plan=plan)
        assert runtime_incompatibility(plan)
        with pytest.raises(PlanError, match=message):
            check_plan_supported(spec)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "then"), [(2, 3), (3, 0)])
def test_a_killed_run_goes_on_with_another_stage_of_zero(zero: int, then: int, tmp_path: Path) -> None:
    """Loss, held-out loss and result are those of one process, also killed and resumed under another cut.

    1. One process trains. 2. Two replicas of two stages share gradients until a rank is killed. 3. The others end and
    name it. 4. Single-stage replicas with another stage of ZeRO go on from the newest checkpoint.
    """
    training = {"evaluate_every": 4, "evaluate_samples": 5}
    job = make_job(tmp_path, "llama-tied", steps=8, checkpoints={"every_steps": 3}, training=training)
    alone = run_job(tmp_path / "alone", moved(job, tmp_path / "alone"), whole_plan(job))
    size = job.training.global_batch_size // 4
    two = [Cut(ends=[1, 4], clusters="aa", micro_batches=2, size=size)] * 2
    cut = moved(job, tmp_path / "cut")
    with started(tmp_path / "cut", cut, make_plan(two, job.training.sequence_length, zero=zero)) as first:
        first.wait_for_step(5)
        os.kill(first.processes[3].pid, signal.SIGKILL)
        assert first.wait() == [PeerError.exit_code] * 3 + [-signal.SIGKILL]
    losses = told(first, 1)
    assert losses == pytest.approx(alone.losses()[: len(losses)], rel=1e-4)
    single = [Cut(ends=[4], clusters="a", micro_batches=2, size=size)] * 2
    second = run_job(tmp_path / "cut", cut, make_plan(single, job.training.sequence_length, zero=then), attempt=2)
    resumed = 8 - len(told(second, 0))
    assert resumed in (3, 6)
    assert told(second, 0) == pytest.approx(alone.losses()[resumed:], rel=1e-4)
    held_out = alone.losses("validation_loss")[-1]
    assert told(second, 0, "validation_loss")[-1] == pytest.approx(held_out, rel=1e-4)
    assert verify(cut)["loss"] == pytest.approx(held_out, rel=1e-4)
