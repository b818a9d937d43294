"""Rates of micro-benchmarks: each with a source, before the defaults, after what was measured."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from isthmus.core.chip import AttentionRate, Chip, SustainedRates, chip_catalogue
from isthmus.core.stack import find_stack
from isthmus.plan import DATA_SHEET, Observation, estimate_s, fit_calibration, predict, with_prior_rates
from isthmus.plan.memory.memory_limit import device_bytes
from isthmus.plan.profile.component import AttentionCore
from isthmus.plan.time.chip_rates import RELATIVE, SLOWEST_CHIP, with_chip_rates
from tests.plan.hand import model_of, plan_of, pool_of

POOL = pool_of("H100")
MEGATRON = plan_of(clusters="a", stack="megatron")


@pytest.mark.parametrize("chip", chip_catalogue().values(), ids=lambda chip: chip.name)
def test_a_sustained_rate_is_below_its_peak(chip: Chip) -> None:
    """A source that says otherwise was read wrongly; a device reports about its data sheet's memory."""
    rates = chip.sustained or SustainedRates(sources={})
    for precision, per_s in rates.matmul_flop_per_s.items():
        assert 0.4 * chip.flop_per_s(precision) < per_s < chip.flop_per_s(precision)
    for one in rates.attention:
        assert one.backward_flop_per_s < one.forward_flop_per_s < chip.flop_per_s("bf16")
    assert (rates.link_bytes_per_s or 1) < chip.in_node_link.bandwidth_bytes_per_s
    if chip.reported_bytes is not None:
        assert 0.97 * chip.memory_bytes < chip.reported_bytes < 1.08 * chip.memory_bytes


def test_rates_come_before_defaults_and_after_measurements() -> None:
    """The share of a micro-benchmark with its uncertainty; a value of a calibration, general or the chip's, stays."""
    completed = with_chip_rates(DATA_SHEET, MEGATRON, POOL)
    assert completed.value("matmul_share", "H100") == pytest.approx(794.5 / 989.5 / SLOWEST_CHIP)
    assert completed.value("attention_share", "H100") == pytest.approx(333 / 989.5)
    assert completed.relative_uncertainty("attention_share", "H100") == RELATIVE["attention_share"]
    for key in ("matmul_share", "H100/matmul_share"):
        measured = DATA_SHEET.with_values({key: 0.6})
        assert with_chip_rates(measured, MEGATRON, POOL).value("matmul_share", "H100") == 0.6
    assert with_chip_rates(completed, MEGATRON, POOL) is completed


def test_a_fit_starts_from_the_rates_that_the_prediction_uses() -> None:
    """A run that takes what is predicted teaches nothing new: a fit to it predicts the same, keys it fits or not."""
    model, keys = model_of(), ["H100/matmul_share", "H100/attention_share", "H100/launch_s"]
    predicted_s = estimate_s(MEGATRON, POOL, model)
    start = with_prior_rates(DATA_SHEET, [(MEGATRON, POOL)], keys)
    assert set(start.parameters) == set(keys[:2]), "what the chip states of what is fitted"
    observed = [Observation(name="r", measured_s=predicted_s, predict_s=lambda c: estimate_s(MEGATRON, POOL, model, c))]
    fitted = fit_calibration(start, keys, observed, name="n", source="s")
    assert estimate_s(MEGATRON, POOL, model, fitted) == pytest.approx(predicted_s, rel=1e-3)
    assert fitted.value("attention_share", "H100") == pytest.approx(333 / 989.5, rel=1e-2)


def test_a_stack_without_a_kernel_and_a_chip_without_rates_keep_the_defaults() -> None:
    """This project's runtime, and any chip with a data sheet alone."""
    assert with_chip_rates(DATA_SHEET, plan_of(clusters="a"), POOL) is DATA_SHEET
    assert with_chip_rates(DATA_SHEET, MEGATRON, pool_of("H20")) is DATA_SHEET


def test_a_chip_with_rates_has_a_narrower_band() -> None:
    """The same plan on the same chip, with and without its micro-benchmarks."""
    bare = chip_catalogue()["H100"].model_copy(update={"sustained": None})
    without = POOL.model_copy(update={"chips": (bare,)})
    known, wide = predict(MEGATRON, POOL, model_of()), predict(MEGATRON, without, model_of())
    assert known.high_s / known.low_s < wide.high_s / wide.low_s
    assert known.assumptions[0] == wide.assumptions[0], "nothing was fitted"


def test_products_in_8_bits_have_a_rate_of_their_own() -> None:
    """1402.6 of 1979 on H100, where bf16 reaches 794.5 of 989.5."""
    chip = chip_catalogue()["H100"]
    assert chip.sustained is not None
    assert chip.sustained.matmul_ratio("fp8", chip) == pytest.approx((1402.6 / 1979) / (794.5 / 989.5))
    assert chip.sustained.matmul_ratio("fp32", chip) == 1.0
    flash2 = chip.sustained.attention_rate("flash2")
    assert flash2.backward_flop_per_s / flash2.forward_flop_per_s == pytest.approx(299 / 333)
    assert chip.sustained.attention_rate("any") is None


@pytest.mark.parametrize(
    ("chip", "kernel", "head", "measured", "within"),
    [
        ("A100", "flash2", 128, {512: 99, 1024: 133, 2048: 155, 4096: 173, 8192: 182, 16384: 189}, 0.04),
        ("A100", "flash2", 64, {1024: 119, 2048: 140, 4096: 156, 8192: 165, 16384: 171}, 0.04),
        ("H100", "flash2", 128, {512: 163, 1024: 221, 2048: 265, 4096: 294, 8192: 308, 16384: 328}, 0.04),
        ("H100", "flash2", 64, {512: 141, 1024: 192, 2048: 232, 4096: 257, 8192: 273, 16384: 284}, 0.04),
        ("H100", "flash3", 128, {1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616}, 0.08),
        ("H100", "flash3", 64, {2048: 371, 4096: 420, 8192: 460, 16384: 473}, 0.08),
        ("H100", "cudnn", 128, {1024: 410, 2048: 484, 4096: 518, 8192: 529, 16384: 539}, 0.08),
        ("H100", "cudnn", 64, {1024: 288, 2048: 334, 4096: 363, 8192: 379, 16384: 388}, 0.09),
        ("H100", "flash2", 256, {4096: 293, 8192: 297}, 0.06),
    ],
)
def test_attention_is_slower_with_short_sequences_and_small_heads(chip, kernel, head, measured, within) -> None:
    """Values of Dao-AILab/flash-attention's figures, with a causal mask, over that of heads of 128 at 8,192 tokens."""
    rate = chip_catalogue()[chip].sustained.attention_rate(kernel)
    at_8k = {("A100", "flash2"): 182, ("H100", "flash2"): 308, ("H100", "flash3"): 602, ("H100", "cudnn"): 529}
    stated = 333 if head == 256 else at_8k[chip, kernel]
    for tokens, value in measured.items():
        assert 1 / rate.time_factor(tokens / 2, head) == pytest.approx(value / stated, rel=within), tokens


def test_a_window_counts_as_the_sequence_with_as_many_keys() -> None:
    """A window of 128 keys wastes as much on its diagonal as 256 tokens: about half; a head of 96 lies between."""
    rate = chip_catalogue()["H100"].sustained.attention_rate("cudnn")
    core = AttentionCore(num_heads=64, num_kv_heads=8, key_dim=64, value_dim=64, window=128)
    keys = core.mean_keys(4096)
    assert rate.time_factor(keys, 128) == pytest.approx(rate.time_factor(128, 128), rel=0.02)
    assert rate.time_factor(128, 128) == pytest.approx((1 + 260 / 256) / (1 + 260 / 8192))
    assert rate.time_factor(128, 96) == pytest.approx(rate.time_factor(128, 128) / 0.86)
    assert rate.time_factor(128, 32) == rate.time_factor(128, 64)
    assert (
        AttentionRate(kernel="flash2", forward_flop_per_s=1e14, backward_flop_per_s=1e14, source="x").time_factor(5, 64)
        == 1.0
    ), "rates alone, as before"


def test_a_rate_without_a_source_is_refused() -> None:
    """And negative rates, and a share of the network above one."""
    with pytest.raises(ValidationError, match="no source for matmul_flop_per_s"):
        SustainedRates(matmul_flop_per_s={"bf16": 1e12}, sources={})
    with pytest.raises(ValidationError):
        SustainedRates(matmul_flop_per_s={"bf16": -1e12}, sources={"matmul_flop_per_s": "x"})
    with pytest.raises(ValidationError):
        SustainedRates(network_share=1.5, sources={"network_share": "x"})


def test_the_capacity_is_what_the_device_reports_where_that_is_known() -> None:
    """79.1 GiB of an H100 of 80 GB; what its data sheet says of a 910B."""
    chip = chip_catalogue()["H100"]
    assert device_bytes(chip) == round(79.1 * 2**30)
    assert device_bytes(chip_catalogue()["910B"]) == 64e9


def test_the_slower_kernel_takes_longer() -> None:
    """`torchtitan` and `megatron` name flash2; a stack that names cudnn is faster on H100 at long sequences."""
    fast = find_stack("megatron").model_copy(update={"attention_kernel": "cudnn", "name": "fast"})
    plans = [plan_of(clusters="a", sequence_length=32768, stack=stack) for stack in ("megatron", fast)]
    slow_s, fast_s = (estimate_s(plan, POOL, model_of()) for plan in plans)
    assert fast_s < 0.95 * slow_s
