"""Each term of a pass by hand, alone: products, core, traffic, what hides an exchange, recomputation, launches.

A chip of `round_numbers`: 500 operations a second in products, 250 in the attention core, 100 bytes a second.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.chip import AttentionRate, SustainedRates
from isthmus.core.stack import find_stack
from isthmus.plan.time.calibration import smooth_max
from isthmus.plan.time.layer_exchanges import CollectiveCall
from isthmus.plan.time.stage_time import PassTime, collective_call_s, hidden_part_s, pass_time
from isthmus.plan.time.stage_work import ChipWork
from tests.plan.round_numbers import UNIT, UNIT_CHIP, chip_model

WORK = ChipWork(matmul_flops=1000.0, matmul_bytes=100.0, attention_flops=500.0, moved_bytes=200.0)
"""Products of 2 + 1 s, a core of 2 s, traffic of 2 s."""

CALL = CollectiveCall(kind="all_gather", num_bytes=64.0, size=2, stride=4)
"""One of 10 + 32/2 s and a hop, between two nodes."""
CALL_S = 10 + 8e-6 + 16


def passed(work: ChipWork = WORK, precision: str = "bf16", recompute: str = "none", **options: object) -> PassTime:
    """The times of the passes on a chip without launches."""
    return pass_time(chip_model(), work, precision, recompute, **options)  # type: ignore[arg-type]


def times(result: PassTime) -> tuple[float, float]:
    """Seconds forward and backward."""
    return result.forward_s, result.backward_s


def with_calls(*calls: CollectiveCall, **fields: object) -> ChipWork:
    """The work with collectives."""
    return replace(WORK, collectives=calls, **fields)  # type: ignore[arg-type]


def test_a_pass_is_the_sum_of_its_work_and_twice_as_long_backward() -> None:
    """3 s of products, 2 of the core, 2 of traffic; the parts of both passes add up."""
    result = passed()
    assert times(result) == pytest.approx((7.0, 14.0))
    assert (result.matmul_s, result.attention_s, result.memory_s, result.exchange_s) == pytest.approx((9, 6, 6, 0))


def test_the_backward_pass_has_its_own_core_and_traffic() -> None:
    """2.5 times the core; the bytes that the work names, and before them those that the caller does."""
    fused = replace(WORK, attention_backward_ratio=2.5)
    assert times(passed(fused)) == pytest.approx((7.0, 15.0))
    assert passed(fused).attention_s == pytest.approx(7.0)
    named = replace(WORK, moved_back_bytes=700.0)
    assert times(passed(named)) == pytest.approx((7.0, 17.0))
    assert passed(named).memory_s == pytest.approx(9.0)
    assert times(passed(named, backward_bytes=100.0)) == pytest.approx((7.0, 11.0))


def test_products_of_8_bits_have_their_peak_and_factor_the_core_has_that_of_16() -> None:
    """Twice the rate, half as fast again as measured: 1 s x 1.5; attention and memory stay. In fp32 all is slower."""
    narrow = pass_time(chip_model(narrow_factor=1.5), WORK, "fp8")
    assert times(narrow) == pytest.approx((1.5 + 1 + 2 + 2, 2 * 2.5 + 4 + 4))
    assert times(pass_time(chip_model(narrow_factor=1.5), WORK, "bf16")) == pytest.approx((7.0, 14.0))
    assert times(passed(precision="fp32")) == pytest.approx((4 + 1 + 4 + 2, 10 + 8 + 4))


def test_a_core_that_chips_share_has_its_factor() -> None:
    """Three times as long, for work that says so."""
    host = chip_model(context_factor=3.0)
    assert times(pass_time(host, WORK, "bf16")) == pytest.approx((7.0, 14.0))
    assert times(pass_time(host, replace(WORK, shares_context=True), "bf16")) == pytest.approx((11.0, 22.0))


FLASH = AttentionRate(
    kernel="flash2", forward_flop_per_s=300.0, backward_flop_per_s=200.0, half_rate_tokens=8192.0, source="tests"
)
RATES = SustainedRates(
    matmul_flop_per_s={"bf16": 500.0, "fp8": 500.0}, attention=(FLASH,), sources={"matmul_flop_per_s": "tests"}
)


def test_a_stated_kernel_sets_the_core_of_its_length_and_its_backward_pass() -> None:
    """8,192 tokens at half of the rate of endless ones; with 4,096 a time of (1 + 2) / (1 + 1); backward 3/2 of it."""
    host = chip_model(UNIT_CHIP.model_copy(update={"sustained": RATES}))
    work = replace(WORK, attention_kernel="flash2", keys_per_query=2048.0, elements_per_head=128.0)
    assert host.attention_rates == {"flash2": FLASH}
    assert times(pass_time(host, work, "bf16")) == pytest.approx((3 + 3 + 2, 6 + 2 * 1.5 * 3 + 4))
    for other in (replace(work, attention_kernel="any"), replace(work, attention_kernel="cudnn")):
        assert times(pass_time(host, other, "bf16")) == pytest.approx((7.0, 14.0))
    assert times(pass_time(chip_model(), work, "bf16")) == pytest.approx((7.0, 14.0))


def test_a_stated_rate_of_8_bits_counts_beside_that_of_16() -> None:
    """A quarter of the peak of 8 bits for half of that of 16: half of the share; only for a kernel of a stack."""
    host = chip_model(UNIT_CHIP.model_copy(update={"sustained": RATES}))
    named = replace(WORK, attention_kernel="flash2", keys_per_query=4096.0, elements_per_head=128.0)
    assert pass_time(host, named, "fp8").forward_s == pytest.approx(2 + 1 + 2 + 2)
    assert pass_time(host, WORK, "fp8").forward_s == pytest.approx(1 + 1 + 2 + 2)


def test_an_exchange_that_nothing_hides_adds_to_both_passes() -> None:
    """The backward one as many times as its ratio says."""
    result = passed(with_calls(replace(CALL, num_calls=2.0, backward_ratio=3.0)))
    assert times(result) == pytest.approx((7 + 2 * CALL_S, 14 + 6 * CALL_S), rel=1e-9)
    assert result.exchange_s == pytest.approx(8 * CALL_S, rel=1e-9)


@pytest.mark.parametrize(("overlapping", "hidden_s"), [(0.0, 0.0), (500.0, 1.0), (1e9, CALL_S)])
def test_weight_gradients_hide_the_backward_exchange(overlapping: float, hidden_s: float) -> None:
    """As many seconds as those of the products before it take: not their operands, nor the forward exchange."""
    result = passed(with_calls(replace(CALL, overlaps=True), overlapping_flops=overlapping))
    assert times(result) == pytest.approx((7 + CALL_S, 14 + CALL_S - hidden_s), rel=1e-9)
    assert result.exchange_s == pytest.approx(2 * CALL_S - hidden_s, rel=1e-9)


def test_frozen_weights_hide_no_exchange_and_have_no_gradient() -> None:
    """A quarter frozen: three quarters of the room, and a quarter of half of the backward products less."""
    work = with_calls(replace(CALL, overlaps=True), overlapping_flops=500.0, frozen_flops=250.0)
    assert passed(work).backward_s == pytest.approx(14 - 3 / 4 + CALL_S - 3 / 4, rel=1e-9)
    assert passed(work).matmul_s == pytest.approx(9 - 3 / 4)
    host = chip_model(backward_overlap=0.5)
    assert pass_time(host, work, "bf16").backward_s == pytest.approx(14 - 3 / 4 + CALL_S - 3 / 8, rel=1e-9)
    bare = replace(work, matmul_flops=0.0, frozen_flops=0.0, matmul_bytes=0.0)
    assert passed(bare).backward_s == pytest.approx(8 + CALL_S - 1, rel=1e-9)


def test_another_micro_batch_hides_what_the_pass_outlasts() -> None:
    """The longer of the two counts, forward and backward; experts' exchanges where the schedule overlaps them."""
    short = replace(CALL, num_calls=0.4)
    for work, options in (
        (with_calls(replace(short, behind="other")), {}),
        (with_calls(replace(short, num_experts=4)), {"overlap_experts": True}),
    ):
        assert times(passed(work, **options)) == pytest.approx((0.4 * CALL_S, 14.0), rel=1e-9)
        twice = replace(work, collectives=work.collectives * 2)
        assert times(passed(twice, **options)) == pytest.approx((0.8 * CALL_S, 0.8 * CALL_S), rel=1e-9)
    exposed = passed(with_calls(short), overlap_experts=True)
    assert times(exposed) == pytest.approx((7 + 0.4 * CALL_S, 14 + 0.4 * CALL_S), rel=1e-9)
    assert passed(with_calls(replace(short, num_experts=4))).forward_s == pytest.approx(7 + 0.4 * CALL_S, rel=1e-9)


@pytest.mark.parametrize(("behind", "forward_s", "backward_s"), [("products", 1.5, 3.0), ("core", 1.0, 2.5)])
def test_products_or_the_core_hide_all_parts_of_an_exchange_but_one(
    behind: str, forward_s: float, backward_s: float
) -> None:
    """Of two chips half of 3 s and 2 x 3 s of products, of a core of 2 s and 2.5 x 2 s; backward where it may."""
    call = replace(CALL, behind=behind)
    work = with_calls(call, attention_backward_ratio=2.5)
    assert times(passed(work)) == pytest.approx((7 + CALL_S - forward_s, 15 + CALL_S - backward_s), rel=1e-9)
    alone = replace(work, collectives=(replace(call, behind_backward=False),))
    assert times(passed(alone)) == pytest.approx((7 + CALL_S - forward_s, 15 + CALL_S), rel=1e-9)
    twice = replace(work, collectives=(replace(call, backward_ratio=2.0),))
    assert passed(twice).backward_s == pytest.approx(15 + 2 * CALL_S - backward_s, rel=1e-9)


def test_no_more_is_hidden_than_there_is() -> None:
    """Of 4 chips three quarters of the room, the whole exchange where that is longer; nothing beside nothing."""
    call = replace(CALL, size=4, behind="products")
    assert [hidden_part_s(call, seconds, 8.0, 1.0) for seconds in (5.0, 6.0, 7.0)] == [5.0, 6.0, 6.0]
    assert hidden_part_s(replace(call, behind="core"), 9.0, 100.0, 8.0) == 6.0
    assert hidden_part_s(replace(call, behind="none"), 9.0, 100.0, 100.0) == 0.0


def test_recomputation_repeats_its_part_and_its_launches() -> None:
    """All and its exchange; the core, products and traffic that the work names; half of the computation."""
    call = replace(CALL, overlaps=True)
    work = with_calls(call, CALL, overlapping_flops=0.0)
    base_s = 14 + 2 * CALL_S
    added = {mode: passed(work, recompute=mode).backward_s - base_s for mode in ("none", "selective", "moe", "full")}
    assert added == pytest.approx({"none": 0.0, "selective": 3.0, "moe": 3.5, "full": 7 + 2 * CALL_S}, rel=1e-9)
    whole = passed(work, recompute="full")
    assert (whole.matmul_s, whole.attention_s, whole.memory_s) == pytest.approx((12, 8, 8))
    assert whole.exchange_s == pytest.approx(6 * CALL_S, rel=1e-9)
    assert passed(work, recompute="moe").matmul_s == pytest.approx(9)
    named = replace(
        WORK, repeated_flops=2000.0, repeated_bytes=500.0, repeated_collectives=(CALL, CALL), repeats_attention=False
    )
    assert passed(named, recompute="selective").backward_s == pytest.approx(14 + 4 + 5 + 2 * CALL_S, rel=1e-9)


def test_a_slow_host_sets_the_pace_by_its_launches() -> None:
    """4 layers of 100 s; backward 1.5 times, and those of what is recomputed: all, a quarter or half."""
    work = ChipWork(num_launches=4.0)
    host = chip_model(launch_s=100.0)
    launches = {mode: pass_time(host, work, "bf16", mode).backward_s for mode in ("none", "selective", "moe", "full")}  # type: ignore[arg-type]
    assert launches == pytest.approx({"none": 600, "selective": 700, "moe": 800, "full": 1000})
    assert pass_time(host, work, "bf16").forward_s == pytest.approx(400)
    late = pass_time(chip_model(skew_s=100.0), ChipWork(collectives=(replace(CALL, size=3, num_calls=2.0),)), "bf16")
    call_s = 2 * (10 + 2 * 8e-6 + 2 / 3 * 64 / 2)
    assert late.forward_s == pytest.approx(smooth_max(call_s, 400.0), rel=1e-9)
    assert late.backward_s == pytest.approx(smooth_max(call_s, 600.0), rel=1e-9)


def test_host_and_chip_wait_for_each_other_smoothly() -> None:
    """The cube root of the sum of cubes; of other exponents the root of theirs; of nothing and nothing nothing."""
    assert smooth_max(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert smooth_max(1.0, 1.0) == pytest.approx(2 ** (1 / 3))
    assert smooth_max(2.0, 1.0) == smooth_max(1.0, 2.0) == pytest.approx(9 ** (1 / 3))
    assert (smooth_max(0.0, 0.0), smooth_max(0.0, 5.0), smooth_max(0.5, 0.0)) == (0.0, 5.0, 0.5)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_reduce", 1 + 2 * 4e-6 + 8 + 10 + 2 * 8e-6 + 16),
        ("all_gather", 1 + 4e-6 + 4 + 10 + 8e-6 + 8),
        ("all_to_all", 10 + 32 / 2),
        ("ring", 3 * (10 + 64 / 2)),
        ("node_all_to_all", 10 + 2 * 1 / 2 * 64 / 2),
    ],
)
def test_calls_are_those_of_the_collective_that_they_name(kind: str, seconds: float) -> None:
    """64 bytes over four chips two positions apart, two a node of two; two and a half times."""
    call = CollectiveCall(
        kind=kind, num_bytes=64.0, size=4, stride=2, num_calls=2.5, num_experts=4, experts_per_token=4
    )  # type: ignore[arg-type]
    if kind == "node_all_to_all":
        seconds = max(seconds, 1 + 4 * 1 / 2 * 64 / 8)
    assert collective_call_s(UNIT, call) == pytest.approx(2.5 * seconds, rel=1e-12)


def test_a_token_limited_to_a_group_of_experts_reaches_its_node_alone() -> None:
    """All experts of one of two groups: one of two nodes, one of which is the own; of both groups both."""
    one = CollectiveCall(
        kind="node_all_to_all", num_bytes=64.0, size=8, num_experts=8, experts_per_token=4, routing_groups=2
    )
    assert collective_call_s(UNIT, one) == pytest.approx(max(10 + 1 / 2 * 64 / 2, 1 + 4 * 3 / 4 * 64 / 8))
    both = replace(one, groups_per_token=2, experts_per_token=8)
    assert collective_call_s(UNIT, both) == pytest.approx(max(10 + 1 * 64 / 2, 1 + 8 * 3 / 4 * 64 / 8))
    assert collective_call_s(UNIT, replace(one, experts_per_token=1)) == pytest.approx(10 + 1 / 2 * 64 / 2)


def test_experts_of_unlike_groups_exchange_over_what_joins_them() -> None:
    """Other calls take the chip's own links; the bias of chip and stack multiply."""
    slow = replace(UNIT, network_bytes_per_s=1.0)
    host = chip_model(expert_topology=slow, bias_factor=1.5, megatron__stack_factor=2.0)
    assert host.call_s(CALL) == pytest.approx(CALL_S)
    assert host.call_s(replace(CALL, num_experts=4)) == pytest.approx(CALL_S + 16)
    assert chip_model().call_s(replace(CALL, num_experts=4)) == pytest.approx(CALL_S)
    assert [host.bias_of(find_stack(name)) for name in ("megatron", "isthmus")] == [3.0, 1.5]
