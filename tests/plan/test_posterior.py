"""Rules of the posterior: it is that of Bayes where there is a closed form, and its bands hold what they promise."""

import math
import random
import statistics

import pytest

from isthmus.plan import DATA_SHEET, Calibration, Observation, describe_fit, fit_calibration
from isthmus.plan.calibrate.find_posterior import (
    DEGREES_OF_FREEDOM,
    INFORMATION,
    SCATTER_PER_SCALE,
    find_posterior,
)
from isthmus.plan.calibrate.posterior import MeasuredValue, Prior
from isthmus.plan.time.calibration import FittedParameter

pytestmark = pytest.mark.integration

CHIP = "A100"


def scaled_run(name: str, measured: float, weights: tuple[float, ...] = (1.0,)) -> Observation:
    """Return a run whose model is the product of parameters to the power of `weights`, each 1 by default."""

    def predict_s(calibration: Calibration) -> float:
        keys = ("bias_factor", "matmul_share")
        return math.exp(sum(w * math.log(calibration.value(k, CHIP)) for w, k in zip(weights, keys, strict=False)))

    return Observation(name=name, measured_s=measured, predict_s=predict_s)


def test_one_run_moves_a_parameter_as_bayes_says():
    """With a scatter far below the prior the parameter takes the run's value; far above, it keeps its own.

    At the maximum the pull of the run equals that of the prior, of 10 %: its share is its precision over both.
    """
    for scatter, limit in ((0.01, 1.0), (0.5, 0.0)):
        start = DATA_SHEET.model_copy(update={"residual": scatter})
        made = fit_calibration(start, [f"{CHIP}/bias_factor"], [scaled_run("r", 1.1)], name="f", source="s")
        moved = math.log(made.value("bias_factor", CHIP)) / math.log(1.1)
        scale = made.residual / SCATTER_PER_SCALE
        error = (1 - moved) * math.log(1.1) / scale
        precision = INFORMATION * (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + error**2) / scale**2
        assert moved == pytest.approx(precision / (precision + 1 / 0.1**2), abs=0.01)
        assert abs(moved - limit) < 0.1


def test_bias_and_scatter_are_told_apart():
    """Twenty runs, all 8 % too slow and 3 % around that: the bias is fitted, and the scatter is 3 %."""
    chance = random.Random(1)
    runs = [scaled_run(str(i), 1.08 * chance.lognormvariate(0, 0.03)) for i in range(20)]
    made = fit_calibration(DATA_SHEET, [f"{CHIP}/bias_factor"], runs, name="f", source="s")
    assert made.value("bias_factor", CHIP) == pytest.approx(1.08, abs=0.02)
    assert 0.02 < made.residual < 0.045
    assert made.relative_uncertainty("bias_factor", CHIP) == pytest.approx(made.residual / math.sqrt(20), rel=0.5)


def test_what_runs_cannot_tell_apart_stays_uncertain_but_correlated():
    """Only the product of two parameters shows: each keeps half of its doubt, the product none."""
    runs = [scaled_run(str(i), 0.9, (1.0, 1.0)) for i in range(8)]
    keys = [f"{CHIP}/bias_factor", f"{CHIP}/matmul_share"]
    start = DATA_SHEET.with_values({keys[1]: 1.0}).model_copy(update={"residual": 0.02})
    made = fit_calibration(start, keys, runs, name="f", source="s")
    assert made.correlation(*keys) < -0.9
    a, b = (made.key_relative(key) for key in keys)
    assert min(a, b) > 0.05
    assert a * a + b * b + 2 * a * b * made.correlation(*keys) < 0.02**2


def test_fits_in_sequence_agree_with_one_fit_of_all():
    """A calibration is a prior: eight runs after eight others give about what sixteen give."""
    chance = random.Random(3)
    runs = [scaled_run(str(i), 0.85 * chance.lognormvariate(0, 0.03), (1.0, 0.3 + 0.1 * (i % 5))) for i in range(16)]
    keys = [f"{CHIP}/bias_factor", f"{CHIP}/matmul_share"]
    start = DATA_SHEET.with_values({keys[1]: 1.0}).model_copy(update={"residual": 0.03})
    once = fit_calibration(start, keys, runs, name="f", source="s")
    first = fit_calibration(start, keys, runs[:8], name="f", source="s")
    twice = fit_calibration(first, keys, runs[8:], name="f", source="s")
    assert len(twice.fitted_on) == 16
    for key in keys:
        assert math.log(once.key_value(key) / twice.key_value(key)) == pytest.approx(0, abs=0.03)
        assert once.key_relative(key) / twice.key_relative(key) == pytest.approx(1, abs=0.35)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_bands_hold_for_unseen_runs(count):
    """Over 300 worlds drawn from the prior, 85 to 95 % of unseen runs are within the 90 % band, for any count."""
    chance, inside = random.Random(count), 0
    worlds = 300
    prior = Prior(mean=(0.0, 0.0), covariance=[[0.01, 0.0], [0.0, 0.04]], scatter_std=0.05, shape_std=0.1)
    for _ in range(worlds):
        truth = chance.gauss(0, 0.1), chance.gauss(0, 0.2)

        def measured(weight: float, truth: tuple[float, float] = truth) -> float:
            return math.exp(truth[0] + weight * truth[1] + chance.gauss(0, 0.05))

        weights = [chance.uniform(0, 1) for _ in range(count)]
        values = [
            MeasuredValue(measured=measured(w), predict=lambda at, _, w=w: math.exp(at[0] + w * at[1])) for w in weights
        ]
        found, seen = find_posterior(values, prior), chance.uniform(0, 1)
        covariance = found.covariance
        variance = covariance[0][0] + 2 * seen * covariance[0][1] + seen**2 * covariance[1][1] + found.scatter_std**2
        off = math.log(measured(seen)) - found.mean[0] - seen * found.mean[1]
        inside += abs(off) <= 1.645 * math.sqrt(variance)
    assert 0.85 <= inside / worlds <= 0.96


def test_more_runs_never_hurt_in_the_mean():
    """Over 60 worlds the mean error on unseen runs falls with every doubling of the runs."""
    errors: dict[int, list[float]] = {count: [] for count in (1, 2, 4, 8, 16)}
    prior = Prior(mean=(0.0, 0.0), covariance=[[0.01, 0.0], [0.0, 0.04]], scatter_std=0.05, shape_std=0.1)
    for world in range(60):
        chance = random.Random(world)
        truth = chance.gauss(0, 0.1), chance.gauss(0, 0.2)
        weights = [chance.uniform(0, 1) for _ in range(16)]
        measured = [math.exp(truth[0] + w * truth[1] + chance.gauss(0, 0.05)) for w in weights]
        values = [
            MeasuredValue(measured=m, predict=lambda at, _, w=w: math.exp(at[0] + w * at[1]))
            for m, w in zip(measured, weights, strict=True)
        ]
        for count, found_errors in errors.items():
            mean = find_posterior(values[:count], prior).mean
            found_errors += [abs(mean[0] + w * mean[1] - truth[0] - w * truth[1]) for w in (0.0, 0.5, 1.0)]
    means = [statistics.fmean(one) for one in errors.values()]
    assert means == sorted(means, reverse=True)


def biased_run(chip: str, measured: float) -> Observation:
    """Return a run on `chip` whose model is the chip's bias alone."""
    return Observation(name=f"{chip} {measured}", measured_s=measured, predict_s=lambda c: c.value("bias_factor", chip))


def test_a_chip_without_runs_takes_half_of_the_others_bias():
    """Half of the prior's variance is shared: the general bias moves half as far as that of the chip with runs."""
    runs = [biased_run("A100", 1.2 + i / 1000) for i in range(8)]
    made = fit_calibration(DATA_SHEET, ["A100/bias_factor"], runs, name="f", source="s")
    assert made.value("bias_factor", "A100") == pytest.approx(1.2, abs=0.02)
    moved = math.log(made.value("bias_factor", "H20")) / math.log(made.value("bias_factor", "A100"))
    assert moved == pytest.approx(0.5, abs=0.02)
    assert made.relative_uncertainty("bias_factor", "H20") == pytest.approx(0.1 * math.sqrt(1 - 0.25), rel=0.05)


def test_biases_of_many_chips_fitted_one_after_another_agree_with_one_fit():
    """Six chips in six fits: each starts from what the others have taught, as in a fit of all."""
    chips = [f"chip{i}" for i in range(6)]
    runs = {chip: [biased_run(chip, 1.05 + i / 50 + j / 1000) for j in range(6)] for i, chip in enumerate(chips)}
    made = DATA_SHEET
    for chip in chips:
        made = fit_calibration(made, [f"{chip}/bias_factor"], runs[chip], name="f", source="s")
    every = [run for chip in chips for run in runs[chip]]
    at_once = fit_calibration(DATA_SHEET, [f"{chip}/bias_factor" for chip in chips], every, name="f", source="s")
    assert made.value("bias_factor") == pytest.approx(at_once.value("bias_factor"), abs=0.01)
    assert 0 < made.relative_uncertainty("bias_factor") < 0.1


def test_runs_of_one_stack_teach_others_of_it():
    """Two stacks on two chips, one took 15 % longer: its factor is 1.15 of the other's, on chips without runs too."""

    def run(chip: str, stack: str, measured: float) -> Observation:
        def predict_s(calibration: Calibration) -> float:
            return calibration.value("bias_factor", chip) * calibration.value("stack_factor", stack)

        return Observation(name=f"{chip} {stack} {measured}", measured_s=measured, predict_s=predict_s)

    runs = [run(chip, "megatron", 1.0 + i / 1000) for chip in ("A100", "H100") for i in range(4)]
    runs += [run(chip, "deepspeed", 1.15 + i / 1000) for chip in ("A100", "H100") for i in range(4)]
    keys = ["A100/bias_factor", "H100/bias_factor", "megatron/stack_factor", "deepspeed/stack_factor"]
    made = fit_calibration(DATA_SHEET, keys, runs, name="f", source="s")
    ratio = made.value("stack_factor", "deepspeed") / made.value("stack_factor", "megatron")
    assert ratio == pytest.approx(1.15, abs=0.02)
    assert made.value("stack_factor", "torchtitan") == 1.0, "a stack without runs keeps its prior"


def test_a_report_says_what_was_learned_what_not_and_what_is_out_of_reach():
    """A parameter that no run informs is named; so is a run that took four times what the prior allows."""
    keys = [f"{CHIP}/bias_factor", f"{CHIP}/link_share"]
    runs = [scaled_run(str(i), 1.05) for i in range(6)]
    made = fit_calibration(DATA_SHEET, keys, runs, name="f", source="s")
    report = describe_fit(DATA_SHEET, made, keys, runs)
    assert [one.key for one in report.learned] == keys[:1]
    assert report.not_learned == (keys[1],)
    assert not report.warnings
    wrong = [scaled_run("wrong", 4.0)]
    far = describe_fit(DATA_SHEET, fit_calibration(DATA_SHEET, keys, wrong, name="f", source="s"), keys, wrong)
    assert "run 'wrong' took 4 times longer than the prior predicts" in far.warnings[0]


def test_both_directions_of_a_link_share_a_parameter():
    """`a<>b` holds for a>b and b>a alike, unless a direction has its own."""
    tied = DATA_SHEET.model_copy(update={"parameters": {"a<>b/wan_share": FittedParameter(value=0.5, relative=0.1)}})
    assert tied.value("wan_share", "a>b") == tied.value("wan_share", "b>a") == 0.5
    assert tied.value("wan_share", "a>c") == DATA_SHEET.value("wan_share")
    own = tied.with_values({"b>a/wan_share": 0.7})
    assert (own.value("wan_share", "a>b"), own.value("wan_share", "b>a")) == (0.5, 0.7)
