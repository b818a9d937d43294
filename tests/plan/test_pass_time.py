"""The time of a pass by hand: what each way to recompute repeats, and what a collective costs the host."""

from __future__ import annotations

import pytest

from isthmus.core.chip import chip_catalogue
from isthmus.core.pool import NodeGroup
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.stage_time import ChipModel, collective_call_s, pass_time
from isthmus.plan.time.stage_work import ChipMicroBatch, ChipWork, CollectiveCall, layer_work
from tests.plan.hand import model_of

CHIP = chip_catalogue()["A100"]
GROUP = NodeGroup(name="g", chip="A100", nodes=1, chips_per_node=8)
PRODUCT = CollectiveCall(kind="all_reduce", num_bytes=1e6, size=4, num_calls=3.0)
LLAMA = profile_model(model_of())
MIXTURE = profile_model(
    model_of().model_copy(
        update={
            "architecture": "MixtralForCausalLM",
            "config": {**model_of().config, "num_local_experts": 8, "num_experts_per_tok": 2},
        }
    )
)


def chip(**values: float) -> ChipModel:
    """A card without launches whose parameters have these values."""
    return ChipModel.of(GROUP, CHIP, DATA_SHEET.with_values({"launch_s": 1e-12, "skew_s": 1e-12} | values))


def work(**more: object) -> ChipWork:
    """Products of matrices, an attention core, moved bytes, and one collective."""
    fields = {"matmul_flops": 1e12, "attention_flops": 4e11, "moved_bytes": 1e9, "collectives": (PRODUCT,)}
    return ChipWork(**(fields | more))


def test_each_way_to_recompute_repeats_its_part_of_the_forward_pass() -> None:
    """All and its collectives; the attention core and half of what is moved; half of the computation; nothing."""
    host, done = chip(), work()
    plain = pass_time(host, done, "bf16")
    exchanged_s = collective_call_s(host.topology, PRODUCT)
    rates = host.rates
    core_s = 4e11 / (CHIP.flop_per_s("bf16") * rates.attention_share)
    moved_s = 1e9 / (CHIP.memory_bandwidth_bytes_per_s * rates.memory_share)
    compute_s = plain.forward_s - exchanged_s
    added = {
        kind: pass_time(host, done, "bf16", kind).backward_s - plain.backward_s
        for kind in ("none", "selective", "moe", "full")
    }
    assert added == pytest.approx(
        {"none": 0.0, "selective": core_s + moved_s / 2, "moe": compute_s / 2, "full": compute_s + exchanged_s}
    )


def test_each_chip_of_a_collective_may_be_late() -> None:
    """Three calls of four chips wait for three others each; where the host is slower than the card, it counts."""
    waits = pass_time(chip(skew_s=1.0), work(), "bf16")
    assert waits.forward_s == pytest.approx(9.0, rel=0.01)
    launches = pass_time(chip(launch_s=5.0), work(num_launches=2.0), "bf16")
    assert launches.forward_s == pytest.approx(10.0, rel=0.01)


def work_of(profile: object, **degrees: object) -> ChipWork:
    """The work of the first layer on one chip, with 256 tokens of 2 bytes."""
    batch = ChipMicroBatch(tokens=256, sequence_length=256, precision_bytes=2, degrees=StageDegrees(**degrees))
    return layer_work(profile.layers[0], batch)  # type: ignore[attr-defined]


def test_products_of_a_dense_layer_are_counted_by_their_matrices() -> None:
    """Two operations per element and token, halved by two chips; those before an all-reduce cannot overlap one.

    Each matrix is read once, each token's inputs and outputs once per matrix.
    """
    hidden, kv, inner, tokens = 2048, 1024, 8192, 256
    overlapping = {"q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv), "gate": (hidden, inner)}
    overlapping["up"] = (hidden, inner)
    reduced = {"o": (hidden, hidden), "down": (inner, hidden)}
    elements = [sum(a * b for a, b in group.values()) for group in (overlapping, reduced)]
    for tp in (1, 2):
        one = work_of(LLAMA, tp=tp)
        assert one.matmul_flops == pytest.approx(2 * tokens * sum(elements) / tp)
        assert one.overlapping_flops == pytest.approx(2 * tokens * elements[0] / tp)
    sizes = [a * b for group in (overlapping, reduced) for a, b in group.values()]
    moved = sum(2 * (size + tokens * (hidden + size / hidden)) for size in sizes)
    assert work_of(LLAMA, tp=1).matmul_bytes == pytest.approx(moved)


def test_expert_parallelism_leaves_the_attention_to_tensor_parallelism() -> None:
    """On two chips its products and its core are halved, where each has half of the experts, whole, for all tokens."""
    one, two = work_of(MIXTURE), work_of(MIXTURE, tp=2, ep=2, sp=True)
    assert two.attention_flops == pytest.approx(one.attention_flops / 2)
    experts = 2 * 256 * 2 * 3 * 2048 * 8192
    rest = one.matmul_flops - experts
    attention = work_of(LLAMA).matmul_flops - experts / 2
    router = rest - attention
    assert 0 < router < 0.01 * attention
    assert two.matmul_flops == pytest.approx((experts + attention) / 2 + router, rel=1e-3)


def test_a_collective_between_nodes_takes_their_network() -> None:
    """Two chips that are neighbours, and two of which each is in a node of its own."""
    two_nodes = NodeGroup(name="g", chip="A100", nodes=2, chips_per_node=8)
    topology = ChipModel.of(two_nodes, CHIP, DATA_SHEET).topology
    near, far = (
        collective_call_s(topology, CollectiveCall(kind="all_gather", num_bytes=1e9, size=2, stride=stride))
        for stride in (1, 8)
    )
    assert far > 2 * near
