"""Stacks: what each framework keeps, by published formulas; one memory limit; files of users."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from isthmus.core.chip import Chip
from isthmus.core.errors import FileError, InputError
from isthmus.core.files.user_files import load_plan, load_stack, read_stack_choice
from isthmus.core.model import load_model
from isthmus.core.stack import Stack, find_stack, stack_names
from isthmus.plan import (
    DATA_SHEET,
    MeshDegrees,
    TrainingMemory,
    TrainingWorkload,
    overfull_stages,
    predict,
    profile_model,
    runtime_incompatibility,
    stage_table,
)
from isthmus.plan.memory.memory_limit import memory_limit_bytes, outside_bytes, reserved_bytes
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.profile.stack_tensors import stacked_profile
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from tests.plan.hand import model_of, plan_of, pool_of

pytestmark = pytest.mark.integration

CONFIGS = Path(__file__).parent / "configs"
LLAMA = load_model(CONFIGS / "llama-3.1-8b.json")
HIDDEN, FFN, HEADS, KV, VOCABULARY, LAYERS = 4096, 14336, 32, 1024, 128256, 32
TOKENS = 8192


def layer_bytes_per_token(stack: str, precision: str = "bf16", recompute: str = "none", **shard: int) -> float:
    """The activations of one decoder layer of Llama 3.1 8B under a stack, per token."""
    layer = stacked_profile(profile_model(LLAMA), stack, precision).layers[0]
    sharding = StageDegrees(sp=shard.get("tp", 1) > 1, **shard).sharding(layer)
    return layer.activation_bytes(TOKENS, TOKENS, 2, recompute, sharding) / TOKENS


def test_megatron_keeps_what_korthikanti_counts():
    """Without dropout and scores: norms' inputs and outputs, q, k, v, the core's result, SwiGLU's input and output.

    Korthikanti et al., MLSys 2023, section 4, with grouped keys and SwiGLU, and 4 bytes of statistics a head and norm.
    """
    bf16 = 2 * (2 * HIDDEN + 2 * HIDDEN + HIDDEN + 2 * KV + HIDDEN + 2 * FFN + FFN)
    assert layer_bytes_per_token("megatron") == bf16 + 4 * HEADS + 2 * 4
    assert layer_bytes_per_token("megatron", tp=8) == pytest.approx((bf16 + 4 * HEADS + 2 * 4) / 8), "all sharded"
    assert layer_bytes_per_token("megatron", recompute="selective") == bf16 + 4 * HEADS + 2 * 4, "flash attention"


def test_transformer_engine_keeps_inputs_of_products_in_8_bits():
    """Of each product's input one byte a token instead of two; that of the output projection in addition."""
    spared = HIDDEN + HIDDEN + FFN - HIDDEN
    assert layer_bytes_per_token("megatron") - layer_bytes_per_token("megatron", "fp8") == spared


def test_torchtitan_keeps_every_second_product():
    """Per-operator recomputation: wq, wv, w1, attention with its statistics, and the block's input.

    Eager layers keep the result of w2 as well, which no backward needs; compiled ones do not.
    """
    kept = 2 * (HIDDEN + HIDDEN + KV + HIDDEN + FFN) + 4 * HEADS
    assert layer_bytes_per_token("torchtitan", recompute="selective") == kept
    assert layer_bytes_per_token("torchtitan-eager", recompute="selective") == kept + 2 * HIDDEN


def test_the_default_stack_changes_nothing():
    """A profile without a stack is that of this project's runtime, object for object."""
    profile = profile_model(LLAMA)
    assert stacked_profile(profile, "isthmus", "bf16") is profile
    other = stacked_profile(profile, "megatron", "bf16")
    assert stacked_profile(other, "megatron", "bf16") is other, "a stacked profile stays as it is"
    assert other.num_parameters == profile.num_parameters
    assert other.forward_flops(TOKENS, TOKENS) == profile.forward_flops(TOKENS, TOKENS)


@pytest.mark.parametrize(
    ("stack", "zero", "each"), [("megatron", 1, 6 + 12 / 8), ("torchtitan", 3, 16 / 8), ("deepspeed", 3, 16 / 8)]
)
def test_state_per_parameter_is_the_published_one(stack, zero, each):
    """Megatron's distributed optimizer 6 + 12/d, FSDP and ZeRO 3 16/d, over d = 8 replicas."""
    profile = stacked_profile(profile_model(LLAMA), stack, "bf16")
    memory = stage_memory(
        profile, (0, LAYERS), is_first=True, is_last=True, micro_batch_size=1, sequence_length=TOKENS, in_flight=1,
        dp=8, zero=zero,
    )  # fmt: skip
    assert memory.static_bytes == pytest.approx(each * profile.num_parameters, rel=1e-6)


def test_fsdp_keeps_two_layers_gathered_and_with_a_pipeline_all():
    """Buffers grow by the other layers of the stage, in bf16, where the stage is not the whole model."""
    profile = stacked_profile(profile_model(LLAMA), "torchtitan", "bf16")

    def buffers(zero: int, is_last: bool) -> float:
        return stage_memory(
            profile, (0, 8), is_first=False, is_last=is_last, micro_batch_size=1, sequence_length=TOKENS, in_flight=1,
            dp=8, zero=zero, recompute="full",
        ).buffers_bytes  # fmt: skip

    each, added = profile.layers[0].parameters, 4 * 8
    assert buffers(3, False) - buffers(0, False) == pytest.approx((8 * 2 + 6 + added) * each), "fp32 sums of gradients"


def test_reserved_memory_lies_between_allocated_and_the_limit():
    """The usual share beyond what is in use, bounded by the limit, never below what is in use."""
    stack = find_stack("megatron")
    assert reserved_bytes(100.0, 1000.0, stack) == pytest.approx(112.0)
    assert reserved_bytes(100.0, 105.0, stack) == 105.0
    assert reserved_bytes(100.0, 50.0, stack) == 100.0


def test_what_lies_outside_the_allocator_counts_groups_of_chips():
    """The context once; a group for data and pipeline, and one for each other degree above one."""
    stack = find_stack("megatron")
    outside = stack.outside
    alone, all_degrees = StageDegrees(), StageDegrees(tp=2, cp=2, ep=2)
    assert outside_bytes(1e11, stack, alone) == outside.context_bytes + outside.group_bytes
    assert outside_bytes(1e11, stack, all_degrees) == outside.context_bytes + 4 * outside.group_bytes
    assert memory_limit_bytes(1e9, stack, all_degrees) == 0.0, "never negative"
    assert memory_limit_bytes(100.0, find_stack("isthmus"), alone) == pytest.approx(95.0)


@pytest.mark.parametrize("name", stack_names())
def test_a_forecast_adds_up_the_memory_of_every_stage(name):
    """Kinds add up to what is allocated; with the peak of the simulation it is what the limit is compared with."""
    plan = plan_of(clusters="aa").model_copy(update={"stack": name})
    forecast = predict(plan, pool_of("A100"), model_of())
    for found, run in zip(forecast.as_dict()["memory"], forecast.result.stages, strict=True):
        kinds = ("weights", "gradients", "optimizer", "activations", "buffers")
        assert found["allocated"] == pytest.approx(sum(found[kind] for kind in kinds))
        assert found["needed"] == pytest.approx(run.peak_memory_bytes)
        assert found["allocated"] <= found["reserved"] <= max(found["limit"], found["allocated"])
        assert found["device"] - found["reserved"] == pytest.approx(found["chip"] - found["limit"])
    assert any(name in note for note in forecast.assumptions) == (name != "isthmus")


def test_a_table_of_stages_has_fewer_micro_batches_in_flight_towards_the_end():
    """1F1B: as many as stages follow, itself included; the optimizer is divided over the replicas."""
    training = TrainingMemory(sequence_length=4096, stack=find_stack("megatron"), zero=1)
    one, eight = (stage_table(LLAMA, MeshDegrees(pp=4, dp=dp), training) for dp in (1, 8))
    assert [row["in_flight"] for row in one] == [4, 3, 2, 1]
    assert [a["optimizer"] / b["optimizer"] for a, b in zip(one, eight, strict=True)] == pytest.approx([8.0] * 4)
    two = TrainingMemory(sequence_length=4096, stack=find_stack("isthmus"), micro_batches=2)
    few = stage_table(LLAMA, MeshDegrees(pp=4), two)
    assert [row["in_flight"] for row in few] == [2, 2, 2, 1]


def test_a_plan_of_another_stack_does_not_run_here():
    """The runtime refuses it, and says whose it is."""
    plan = plan_of(clusters="aa").model_copy(update={"stack": "megatron"})
    assert runtime_incompatibility(plan) == "stack megatron: a plan for another framework"


def test_a_stack_of_a_file_is_read_with_a_plan(tmp_path):
    """The path is relative to the plan; afterwards the plan holds the whole stack."""
    own = find_stack("megatron").model_dump(mode="json") | {"name": "ours", "version": "2"}
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(own), encoding="utf-8")
    document = plan_of(clusters="aa").model_dump(mode="json") | {"stack": "ours.yaml"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    plan = load_plan(tmp_path / "plan.yaml")
    assert isinstance(plan.stack, Stack)
    assert plan.stack.name == "ours"
    again = type(plan).model_validate_json(plan.model_dump_json())
    assert again.stack == plan.stack
    assert read_stack_choice("torchtitan", tmp_path) == "torchtitan"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": {"bf16": {"weights": -1, "gradients": 4, "optimizer": 12}}}, "greater than 0"),
        ({"buffer_bytes": 5.0}, "no source for buffer_bytes"),
        ({"tensors": [{"tensors": "q", "kept": 1.5, "source": "x"}]}, "less than or equal to 1"),
        ({"tensors": [{"tensors": "q", "kept": 0.5}]}, "source: is missing"),
        ({"kepd": 1}, "unknown"),
        ({"name": "../../etc"}, "must be a name"),
    ],
)
def test_a_stack_that_is_wrong_is_refused_with_its_place(tmp_path, change, words):
    """Shares above one, negative bytes, numbers without a source, unknown fields."""
    base = find_stack("isthmus").model_dump(mode="json", exclude_none=True)
    file = tmp_path / "stack.yaml"
    merged = {**base, **change}
    if "state" in change:
        merged["state"] = {**base["state"], **change["state"]}
    file.write_text(yaml.safe_dump(merged), encoding="utf-8")
    with pytest.raises(FileError) as refused:
        load_stack(file)
    assert words in str(refused.value) or words in str(refused.value.hint or ""), str(refused.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [", b"a: &x [*x, *x]\n", b"- 1\n", b""])
def test_a_file_that_is_no_stack_is_refused(tmp_path, content):
    """Bytes that are no text, no YAML, no mapping, nothing."""
    (tmp_path / "stack.yaml").write_bytes(content)
    with pytest.raises(FileError):
        load_stack(tmp_path / "stack.yaml")


def cost_table(stack: str, memory_gib: float, tp: int) -> StageCostTable:
    """The search's table of stages of a small model on one chip kind."""
    chip = {
        "name": "X", "peak_flop_per_s": {"bf16": 1e14}, "memory_bytes": f"{memory_gib} GiB",
        "memory_bandwidth_bytes_per_s": 1e12, "in_node_link": {"name": "l", "bandwidth_bytes_per_s": 1e11},
    }  # fmt: skip
    pool = pool_of("A100").model_copy(update={"chips": (Chip.model_validate(chip),)})
    cluster = pool.clusters[0]
    group = cluster.node_groups[0].model_copy(update={"chip": "X"})
    slot = ChipSlot(cluster="a", owner="o", group=group, chip=pool.chips[0], chips=8)
    profile = stacked_profile(profile_model(model_of()), stack, "bf16")
    workload = TrainingWorkload(profile, 2048, "bf16", DATA_SHEET)
    return StageCostTable(workload, slot, StageDegrees(tp=tp, sp=tp > 1), 2)


@pytest.mark.parametrize("stack", stack_names())
@pytest.mark.parametrize("tp", [1, 2])
def test_planner_and_simulator_have_one_memory_limit(stack, tp):
    """At every size of chip a stage that the search offers is one that `simulate` accepts, and the reverse.

    The model's layers are equal, so the search's sums are those of the simulator.
    """
    model = model_of()
    answers = set()
    for hundredths in range(100, 2000, 37):
        table = cost_table(stack, hundredths / 100, tp)
        found = table.fit_stage(0, model.num_layers, 1, 1, 0)
        recomputed = model.num_layers if found is None else found.recomputed
        plan = plan_of(
            clusters="a", tp=tp, sp=tp > 1, micro_batch_size=2, sequence_length=2048, stack=stack,
            recompute="full" if recomputed else "none", recompute_layers=recomputed,
        )  # fmt: skip
        pool = pool_of("A100").model_copy(update={"chips": (table.chip.model_copy(update={"name": "A100"}),)})
        accepted = not overfull_stages(plan, pool, predict(plan, pool, model))
        offered = found is not None
        assert offered == accepted, f"{hundredths / 100} GiB, {recomputed} layers recomputed"
        answers.add(offered)
    assert answers == {True, False}, "both sides of the limit were tried"


def test_an_unknown_stack_is_refused_with_the_known_ones(tmp_path):
    """By name and by path."""
    with pytest.raises(InputError, match="unknown stack 'megatorn'") as refused:
        read_stack_choice("megatorn", tmp_path)
    assert "megatron" in str(refused.value.hint)
    with pytest.raises(FileError):
        read_stack_choice("absent.yaml", tmp_path)
