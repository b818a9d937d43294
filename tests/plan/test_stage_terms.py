"""The time of a stage by hand: which passes it adds up, with which factors; updates; the links of a node group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.chip import SustainedRates
from isthmus.core.pool import NodeGroup
from isthmus.core.stack import find_stack
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.time.collectives import Topology
from isthmus.plan.time.stage_time import (
    ChipModel,
    MicroBatchShape,
    PassTime,
    embedding_pass_time,
    head_pass_time,
    host_link_bytes_per_s,
    host_update_s,
    pass_time,
    stage_pass_time,
    update_s,
)
from isthmus.plan.time.stage_work import embedding_work, layer_work
from tests.plan.round_numbers import DENSE_LAYER, EXPERT_LAYER, UNIT_CHIP, calibration_of, chip_model, profile_of

SHAPE = MicroBatchShape(micro_batch_size=2, sequence_length=50, precision="bf16")
MODEL = profile_of(DENSE_LAYER, DENSE_LAYER, EXPERT_LAYER, DENSE_LAYER)
ONE, HALVES = StageDegrees(), StageDegrees(tp=2)
HOST = chip_model()


def layer_s(
    layer: object = DENSE_LAYER, mode: str = "none", degrees: StageDegrees = ONE, **options: object
) -> PassTime:
    """The times of one layer."""
    work = layer_work(layer, SHAPE.per_chip(degrees))  # type: ignore[arg-type]
    return pass_time(HOST, work, "bf16", mode, **options)  # type: ignore[arg-type]


def stage_s(first: int, last: int, host: ChipModel = HOST, degrees: StageDegrees = ONE, **options: object) -> PassTime:
    """The times of the stage of these layers."""
    return stage_pass_time(MODEL, (first, last), host, SHAPE, degrees, **options)  # type: ignore[arg-type]


def assert_times(found: PassTime, *parts: PassTime, factor: float = 1.0) -> None:
    """Seconds forward and backward are those of the parts, times a factor."""
    assert found.forward_s == pytest.approx(factor * sum(one.forward_s for one in parts), rel=1e-12)
    assert found.backward_s == pytest.approx(factor * sum(one.backward_s for one in parts), rel=1e-12)


@pytest.mark.parametrize(
    ("precision", "num_bytes"), [("fp64", 8), ("fp32", 4), ("tf32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 2)]
)
def test_an_activation_has_the_bytes_of_its_precision(precision: str, num_bytes: int) -> None:
    """Products of 8 bits give results of 16; 3 chips of a sequence have a third of its tokens each."""
    shape = replace(SHAPE, precision=precision, packed_tokens=25)
    share = shape.per_chip(StageDegrees(cp=4))
    assert (share.tokens, share.sequence_length, share.packed_tokens) == (25.0, 50, 25)
    assert (shape.precision_bytes, share.precision_bytes) == (num_bytes, num_bytes)
    assert share.degrees == StageDegrees(cp=4)


def test_the_links_of_a_node_group_run_at_the_shares_that_collectives_reach() -> None:
    """16 bytes a second by 0.5 inside; 80 Gbit/s are 10 GB/s, by 0.4, between nodes of 4, or of a domain of 8."""
    shares = calibration_of(
        link_share=0.5, network_share=0.4, link_latency_s=3.0, network_latency_s=5.0, unit__step_s=7.0
    )
    group = NodeGroup(name="g", chip="unit", nodes=4, chips_per_node=4, network_gbps=80.0)
    host = ChipModel.of(group, UNIT_CHIP, shares)
    assert host.topology == Topology(
        chips_per_node=4, link_bytes_per_s=8.0, link_latency_s=3.0, network_bytes_per_s=4e9, network_latency_s=5.0
    )
    assert (host.chip, host.calibration, host.rates.step_s) == (UNIT_CHIP, shares, 7.0)
    domain = group.model_copy(update={"chips_per_domain": 8})
    assert ChipModel.of(domain, UNIT_CHIP, shares).topology.chips_per_node == 8
    assert host.expert_topology is None


def test_a_stage_in_the_middle_is_its_layers() -> None:
    """Equal layers count as often as there are of them."""
    assert_times(stage_s(1, 3), layer_s(), layer_s(EXPERT_LAYER))
    assert_times(stage_s(1, 2), layer_s())


def test_the_first_stage_holds_the_embedding_and_the_last_the_head() -> None:
    """A whole model has both."""
    share = SHAPE.per_chip(ONE)
    embedding = embedding_pass_time(MODEL, HOST, share, "bf16")
    head = head_pass_time(MODEL, HOST, share, "bf16")
    assert embedding == pass_time(HOST, embedding_work(MODEL, share), "bf16")
    assert_times(stage_s(0, 2), embedding, layer_s(), layer_s())
    assert_times(stage_s(2, 4), layer_s(EXPERT_LAYER), layer_s(), head)
    assert_times(stage_s(0, 4), embedding, *[layer_s()] * 3, layer_s(EXPERT_LAYER), head)


def test_ends_compute_in_16_bits_where_the_layers_compute_in_8() -> None:
    """Products of the layers alone run at the rate of 8 bits."""
    share = SHAPE.per_chip(ONE)
    narrow = replace(SHAPE, precision="fp8")
    for layers, end in (
        ((0, 1), embedding_pass_time(MODEL, HOST, share, "bf16")),
        ((3, 4), head_pass_time(MODEL, HOST, share, "bf16")),
    ):
        layer = pass_time(HOST, layer_work(DENSE_LAYER, share), "fp8")
        assert_times(stage_pass_time(MODEL, layers, HOST, narrow, ONE), layer, end)
    wide, share = replace(SHAPE, precision="fp32"), replace(SHAPE, precision="fp32").per_chip(ONE)
    layer = pass_time(HOST, layer_work(DENSE_LAYER, share), "fp32")
    assert_times(stage_pass_time(MODEL, (3, 4), HOST, wide, ONE), layer, head_pass_time(MODEL, HOST, share, "fp32"))


def test_the_first_layers_of_a_stage_are_recomputed() -> None:
    """All where no number is named."""
    full, plain = layer_s(mode="full"), layer_s()
    assert_times(
        stage_s(0, 2, recompute="full"), full, full, embedding_pass_time(MODEL, HOST, SHAPE.per_chip(ONE), "bf16")
    )
    two = stage_pass_time(
        profile_of(*[DENSE_LAYER] * 5), (1, 4), HOST, SHAPE, ONE, recompute="full", recompute_layers=2
    )
    assert_times(two, full, full, plain)
    none = stage_pass_time(
        profile_of(*[DENSE_LAYER] * 5), (1, 4), HOST, SHAPE, ONE, recompute="full", recompute_layers=0
    )
    assert_times(none, plain, plain, plain)


def test_experts_overlap_where_the_schedule_lets_them() -> None:
    """DualPipe hides their exchange behind another micro-batch."""
    dealt = StageDegrees(ep=4)
    hidden, exposed = (stage_s(2, 3, degrees=dealt, overlap_experts=overlap) for overlap in (True, False))
    assert_times(hidden, layer_s(EXPERT_LAYER, degrees=dealt, overlap_experts=True))
    assert_times(exposed, layer_s(EXPERT_LAYER, degrees=dealt))
    assert hidden.forward_s < exposed.forward_s
    assert stage_s(2, 3, degrees=dealt) == exposed


def test_measured_shapes_scale_the_layers_and_ends_that_they_are_of() -> None:
    """By chip, hidden size, tokens and tensor parallelism; ends by vocabulary, without tensor parallelism."""
    share = SHAPE.per_chip(ONE)
    measured = chip_model(
        **{
            "unit:h8:n100:tp1__shape_time": 2.0,
            "unit:h8:n100:v16__embedding_time": 3.0,
            "unit:h8:n100:v16__head_time": 5.0,
        }
    )
    halves = chip_model(**{"unit:h8:n100:tp2__shape_time": 7.0})
    embedding, head = (one(MODEL, HOST, share, "bf16").scaled(factor)
                       for one, factor in ((embedding_pass_time, 3.0), (head_pass_time, 5.0)))  # fmt: skip
    twice = layer_s().scaled(2.0)
    assert_times(stage_s(0, 2, measured), embedding, twice, twice)
    assert_times(stage_s(3, 4, measured), twice, head)
    assert_times(stage_s(1, 2, measured, HALVES), layer_s(degrees=HALVES))
    assert_times(stage_s(1, 2, halves, HALVES), layer_s(degrees=HALVES).scaled(7.0))
    ends = [measured.end_factor(name, MODEL, SHAPE.per_chip(HALVES)) for name in ("embedding_time", "head_time")]
    assert ends == [1.0, 1.0]


def test_the_bias_of_chip_and_stack_scales_a_whole_stage() -> None:
    """Layers and ends alike."""
    biased = chip_model(bias_factor=1.5, isthmus__stack_factor=2.0)
    assert_times(stage_s(0, 4, biased), stage_s(0, 4), factor=3.0)


def with_loss(**fields: object) -> ModelProfile:
    """The model under a stack whose loss moves 40 bytes a logit forward and 10 backward."""
    stack = find_stack("isthmus")
    known = {"forward_bytes": 40.0, "backward_bytes": 10.0, "chunk_bytes": None}
    return profile_of(
        DENSE_LAYER, stack=stack.model_copy(update={"loss": stack.loss.model_copy(update=known | fields)})
    )


def test_the_backward_pass_of_the_head_moves_what_its_loss_does() -> None:
    """A quarter of the forward pass; a loss by chunks computes the logits of each again."""
    share = SHAPE.per_chip(ONE)
    moved = 40 * 100 * 16 + 4 * 100 * 8 * 2
    product_s, operands_s = 2 * 100 * 128 / 500, 2 * (128 + 100 * (8 + 16)) / 100
    plain = head_pass_time(with_loss(), HOST, share, "bf16")
    assert plain.forward_s == pytest.approx(product_s + operands_s + moved / 100)
    assert plain.backward_s == pytest.approx(2 * (product_s + operands_s) + moved / 4 / 100)
    chunked = head_pass_time(with_loss(chunk_bytes=4.0 * 16 * 99), HOST, share, "bf16")
    assert chunked.backward_s - plain.backward_s == pytest.approx(product_s)
    assert head_pass_time(with_loss(chunk_bytes=4.0 * 16 * 100), HOST, share, "bf16") == plain
    halves = SHAPE.per_chip(HALVES)
    assert head_pass_time(with_loss(chunk_bytes=4.0 * 16 * 99), HOST, halves, "bf16") == head_pass_time(
        with_loss(), HOST, halves, "bf16"
    ), "each of two chips has half of the logits"


def test_an_update_moves_the_bytes_of_adam() -> None:
    """36 a parameter with a copy of two bytes, 28 in fp32, at half of 200 bytes a second; times its factor."""
    host = chip_model(update_time=3.0)
    assert [update_s(HOST, 50.0, each) for each in (2, 4, 8)] == pytest.approx([18.0, 14.0, 14.0])
    assert update_s(host, 50.0, 2) == pytest.approx(54.0)


def test_an_update_on_the_host_crosses_its_link_and_moves_the_same_bytes_there() -> None:
    """Gradients of four bytes there, weights back, at 25.1 GB/s or as stated; then 25 GB/s of memory."""
    stated = UNIT_CHIP.model_copy(
        update={"sustained": SustainedRates(host_bytes_per_s=50e9, sources={"host_bytes_per_s": "tests"})}
    )
    bare = UNIT_CHIP.model_copy(update={"sustained": SustainedRates(sources={})})
    assert [host_link_bytes_per_s(one) for one in (UNIT_CHIP, bare, stated)] == [25.1e9, 25.1e9, 50e9]
    assert host_update_s(stated, 1e9, 2) == pytest.approx(6 / 50 + 36 / 25)
    assert host_update_s(stated, 1e9, 4) == pytest.approx(8 / 50 + 28 / 25)
    assert host_update_s(UNIT_CHIP, 1e9, 8) == pytest.approx(12 / 25.1 + 28 / 25)
