"""What the replicas of a stage exchange, by hand: gradients, weights that ZeRO gathers, copies, averaged parameters."""

from __future__ import annotations

import pytest

from isthmus.core.plan import Plan
from isthmus.core.plan_parts.low_rank_adapters import LowRankAdapters
from isthmus.core.plan_parts.shard_group import ShardGroup
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.plan.memory.plan_stage_memory import stage_degrees
from isthmus.plan.time.replica_reduction import hybrid_gather_s, hybrid_reduce_s, replicas_all_gather_s
from isthmus.plan.time.stage_costs import beside_s
from isthmus.plan.time.stage_time import MicroBatchShape, stage_pass_time
from tests.plan.hand import plan_of
from tests.plan.test_stage_loads import ENDS, FIRST, LAST, LAYER, PROFILE, costs, load, pool_of


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({"dp": 1}, 4.0),
        ({"dp": 1, "zero": 1}, (4 + 2) / 2),
        ({"dp": 4}, 4.0),
        ({"dp": 4, "precision": "fp32"}, 4.0),
        ({"dp": 4, "formats": TensorFormats(gradients="bf16")}, 2.0),
        ({"dp": 4, "zero": 1}, (4 + 2) / 2),
        ({"dp": 4, "zero": 2, "precision": "fp32"}, (4 + 4) / 2),
        ({"dp": 4, "zero": 1, "formats": TensorFormats(gathers="fp8")}, (4 + 1) / 2),
        ({"dp": 4, "zero": 2, "formats": TensorFormats(gradients="bf16")}, (2 + 2) / 2),
        ({"dp": 4, "zero": 3}, 4 / 2),
        ({"dp": 4, "zero": 3, "sharding": ShardGroup(reshard=False)}, (4 + 2) / 2),
    ],
)
def test_gradients_are_reduced_and_weights_gathered_in_their_formats(fields: dict[str, object], each: float) -> None:
    """Half of both with ZeRO, which an all-reduce of as many bytes takes; in each pass with ZeRO 3."""
    first, last = costs(plan_of(clusters="aa", **fields))
    assert first.load.gradient_bytes == pytest.approx(FIRST * each)
    assert last.load.gradient_bytes == pytest.approx(LAST * each)


def test_tensor_parallel_chips_reduce_the_gradients_of_their_part() -> None:
    """Of all chips of a stage together; vectors are on each of them."""
    vectors = 2 * 2048 * 4
    assert load(plan_of(clusters="aa", tp=2, dp=2)).gradient_bytes == pytest.approx(4 * (FIRST + vectors))


@pytest.mark.parametrize(("zero", "gathered"), [(1, 2), (2, 2), (3, 0)])
def test_replicas_that_shard_in_groups_take_the_seconds_of_their_collectives(zero: int, gathered: int) -> None:
    """8 replicas in groups of 4: what a ring of the whole would take, 2 (p - 1) / p of the bytes at its rate."""
    plan = plan_of(clusters="aa", dp=8, zero=zero, sharding=ShardGroup(replicas=4))
    one = costs(plan)[0]
    seconds = 2 * 7 / 8 * one.load.gradient_bytes / one.load.local_bytes_per_s
    assert seconds == pytest.approx(hybrid_reduce_s(one.reducing, 4, 4 * FIRST, gathered * FIRST))
    if zero == 3:
        bare = stage_pass_time(
            PROFILE, (0, 4), one.chip_model,
            MicroBatchShape(micro_batch_size=1, sequence_length=2048, precision="bf16"),
            stage_degrees(plan, one.stage),
        )  # fmt: skip
        gather_s = hybrid_gather_s(one.reducing, 4, 2 * FIRST)
        assert one.load.forward_s == pytest.approx(max(bare.forward_s, gather_s))


@pytest.mark.parametrize("format_bytes", [1, 2])
def test_zero_3_gathers_weights_beside_each_pass(format_bytes: int) -> None:
    """NCCL takes 15 % of the multiprocessors for that time; weights that stay gathered are not gathered again."""
    formats = TensorFormats(gathers="fp8") if format_bytes == 1 else None
    plan = plan_of(clusters="aa", dp=4, zero=3, tp=2, formats=formats, micro_batch_size=4)
    one = costs(plan, pool_of("nccl"))[0]
    parameters = one.memory.weights_bytes / 2 * 4
    gather_s = replicas_all_gather_s(one.reducing, format_bytes * parameters * 2)
    assert 0 < gather_s < one.time.forward_s
    assert one.load.forward_s == pytest.approx(beside_s(one.time.forward_s, gather_s, 0.15))
    assert one.load.backward_s == pytest.approx(beside_s(one.time.backward_s, gather_s, 0.15))
    for fields in ({"zero": 2}, {"zero": 3, "sharding": ShardGroup(reshard=False)}):
        kept = costs(plan.model_copy(update=fields), pool_of("nccl"))[0]
        assert kept.load.forward_s == pytest.approx(kept.time.forward_s)
    slow = costs(plan.model_copy(update={"micro_batch_size": 1}), pool_of("gloo", peak_flop_per_s={"bf16": 1e18}))[0]
    assert slow.load.forward_s == pytest.approx(max(gather_s, slow.time.forward_s))


def test_gradients_hide_behind_the_last_backward_pass_where_the_plan_says_so() -> None:
    """What is longer is exposed in proportion; NCCL slows the pass by 15 % of what is hidden."""
    for micro_batch_size in (1, 64):
        plan = plan_of(clusters="aa", dp=4, overlap_gradients=True, micro_batch_size=micro_batch_size)
        plain = costs(plan.model_copy(update={"overlap_gradients": False}), pool_of("nccl"))[0]
        one = costs(plan, pool_of("nccl"))[0]
        reduce_s = 2 * 3 / 4 * 4 * FIRST / one.load.local_bytes_per_s
        hidden_s = min(reduce_s, one.time.backward_s)
        assert one.load.gradient_bytes == pytest.approx(4 * FIRST * (1 - hidden_s / reduce_s))
        assert one.load.update_s - plain.load.update_s == pytest.approx(0.15 * hidden_s)
        assert plain.load.gradient_bytes == pytest.approx(4 * FIRST)
    alone = costs(plan_of(clusters="aa", overlap_gradients=True), pool_of("nccl"))[0]
    assert alone.load.update_s == costs(plan_of(clusters="aa"), pool_of("nccl"))[0].load.update_s
    framework = costs(plan_of(clusters="aa", dp=4, stack="torchtitan", micro_batch_size=64))[0]
    assert framework.load.gradient_bytes == pytest.approx(0.0, abs=1.0), "FSDP reduces behind the pass"


def test_adapters_alone_have_gradients_and_updates_and_all_weights_are_gathered() -> None:
    """Two factors of 16 beside the query of four layers; ZeRO 3 gathers them and what is frozen."""
    lora = LowRankAdapters(rank=16, targets=("q",))
    trained = 4 * 16 * (2048 + 2048)
    one = costs(plan_of(clusters="aa", lora=lora))[0]
    assert one.load.gradient_bytes == pytest.approx(4 * trained)
    assert one.load.update_s == pytest.approx(0.125 + trained * 36 / 1e12)
    for zero in (1, 2, 3):
        dealt = costs(plan_of(clusters="aa", lora=lora, dp=2, zero=zero))[0]
        assert dealt.load.gradient_bytes == pytest.approx(trained * (2 if zero == 3 else 3))
        assert dealt.load.update_s == pytest.approx(0.125 + trained / 2 * 36 / 1e12)
    idle = pool_of(peak_flop_per_s={"bf16": 1e18}, memory_bandwidth_bytes_per_s=1e18)
    gathered = costs(plan_of(clusters="aa", lora=lora, dp=2, zero=3, sequence_length=1), idle)[0]
    gather_s = replicas_all_gather_s(gathered.reducing, 2 * (FIRST + trained))
    assert gathered.load.forward_s == pytest.approx(gather_s, rel=1e-6)


def test_local_steps_average_all_parameters_in_four_bytes() -> None:
    """Over all chips of a stage; replicas of one cluster reduce at its rate."""
    plan = plan_of(clusters="a", dp=2)
    away = plan.stages[1].model_copy(update={"cluster": "b"})
    plan = Plan.model_validate(plan.model_dump() | {"stages": (plan.stages[0], away), "local_steps": 2})
    whole = 8 * LAYER + 2 * ENDS + 2048
    assert load(plan).averaged_bytes == pytest.approx(4 * whole)
    assert load(plan_of(clusters="aa", dp=2)).averaged_bytes == 0
    assert load(plan_of(clusters="aa", dp=2)).local_bytes_per_s == pytest.approx(1e11, rel=2e-4)


def test_zero_3_of_torchtitan_copies_gathered_weights_between_buffers() -> None:
    """Four bytes a parameter forward, six more backward with gradients; not what one replica holds alone."""
    plan = plan_of(clusters="a", dp=2, zero=3, stack="torchtitan", micro_batch_size=8)
    one = costs(plan)[0]
    whole = 8 * LAYER + 2 * ENDS + 2048
    rule = one.stack.gathered
    assert (rule.forward_copy_bytes, rule.backward_copy_bytes) == (4, 10)
    assert one.load.forward_s - one.time.forward_s == pytest.approx(whole * 4 / 1e12)
    assert one.load.backward_s - one.time.backward_s == pytest.approx(whole * 10 / 1e12)
    for fields in (
        {"clusters": "a", "zero": 3}, {"clusters": "a", "dp": 2, "zero": 2},
        {"clusters": "a", "dp": 2, "zero": 3, "sharding": ShardGroup(reshard=False)},
        {"clusters": "aa", "dp": 2, "zero": 3},
    ):  # fmt: skip
        bare = costs(plan_of(stack="torchtitan", micro_batch_size=8, **fields))[0]
        assert bare.load.forward_s == pytest.approx(bare.time.forward_s), fields
