"""Rules of calibration: what was put in comes out, as surely as it says; nothing is compared with its own."""

import math
import random

import pytest

from isthmus.core.errors import FileError, InputError
from isthmus.plan import (
    DATA_SHEET,
    Calibration,
    Observation,
    estimate_s,
    fit_calibration,
    load_calibration,
    predict,
    profile_model,
    save_calibration,
)
from isthmus.plan.calibrate.find_posterior import SCATTER_PRIOR_RUNS
from isthmus.plan.time.calibration import FittedParameter
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS, shape_scope
from tests.plan.hand import model_of, plan_of, pool_of

pytestmark = pytest.mark.integration

TRUE = {"A100/matmul_share": 0.62, "A100/memory_share": 0.7, "A100/launch_s": 1.1e-3, "A100/link_share": 0.6}


def runs_of(noise: float, seed: int = 0, factor: float = 1.0) -> list[Observation]:
    """Return synthetic runs of many shapes, made with `TRUE` and log-normal noise."""
    chance, pool, runs = random.Random(seed), pool_of("A100"), []
    truth = DATA_SHEET.with_values(TRUE)
    for hidden in (512, 2048, 4096):
        profile = profile_model(model_of(hidden=hidden))
        for tp in (1, 2, 4, 8):
            for size, count in ((1, 8), (4, 8), (1, 16), (4, 16)):
                plan = plan_of(clusters="aa", tp=tp, micro_batch_size=size, micro_batches=count)
                measured_s = estimate_s(plan, pool, profile, truth) * chance.lognormvariate(0, noise)
                if hidden == 512:
                    measured_s *= factor
                runs.append(
                    Observation(
                        name=f"{hidden}-{tp}-{size}-{count}",
                        measured_s=measured_s,
                        predict_s=lambda c, plan=plan, profile=profile: estimate_s(plan, pool, profile, c),
                        shape_scope=shape_scope("A100", hidden, size * 2048, tp),
                    )
                )
    return runs


def test_known_parameters_are_recovered_exactly_without_noise():
    """From exact times of many shapes, the parameters come back to within 2 % or their stated error."""
    fitted = fit_calibration(DATA_SHEET, list(TRUE), runs_of(0.0), name="f", source="synthetic")
    for key, value in TRUE.items():
        scope, _, name = key.rpartition("/")
        assert fitted.value(name, scope) == pytest.approx(
            value, rel=0.02 + 2 * fitted.relative_uncertainty(name, scope)
        )
    assert fitted.value("matmul_share", "A100") == pytest.approx(0.62, rel=0.02)
    free = len(runs_of(0.0)) - len(TRUE) + SCATTER_PRIOR_RUNS
    left = DATA_SHEET.residual * math.sqrt(SCATTER_PRIOR_RUNS / free)
    assert fitted.residual <= 1.01 * left, "the prior's scatter alone, which counts as three runs: the times are exact"


@pytest.mark.parametrize("seed", range(3))
def test_known_parameters_are_recovered_within_their_own_uncertainty(seed):
    """With 3 % of noise each parameter is within three of the standard deviations that the fit states."""
    fitted = fit_calibration(DATA_SHEET, list(TRUE), runs_of(0.03, seed), name="f", source="synthetic")
    for key, value in TRUE.items():
        found = fitted.parameters[key]
        assert abs(found.value / value - 1) < 3 * found.relative + 0.01
        assert found.relative < TIME_MODEL_PARAMETERS[key.split("/")[1]].relative


def test_what_the_runs_say_nothing_about_keeps_its_default():
    """Runs inside one cluster move no WAN parameter, and leave it as unsure as before."""
    fitted = fit_calibration(DATA_SHEET, ["wan_share"], runs_of(0.0)[:4], name="f", source="synthetic")
    assert fitted.value("wan_share") == pytest.approx(DATA_SHEET.value("wan_share"), rel=1e-6)
    assert fitted.relative_uncertainty("wan_share") == pytest.approx(
        DATA_SHEET.relative_uncertainty("wan_share"), rel=1e-3
    )


def test_an_outlier_hardly_moves_the_fit():
    """One run of forty-eight that took thrice as long moves the peak's share by less than 5 %."""
    runs = runs_of(0.01)
    wrong = [
        Observation(name="slow", measured_s=3 * runs[-1].measured_s, predict_s=runs[-1].predict_s),
        *runs[:-1],
    ]
    fitted = fit_calibration(DATA_SHEET, list(TRUE), wrong, name="f", source="synthetic")
    assert fitted.value("matmul_share", "A100") == pytest.approx(0.62, rel=0.05)


def test_shapes_take_what_the_roofline_misses():
    """Shapes that run 10 % slower than the roofline are predicted so once measured; others stay."""
    runs = runs_of(0.0, factor=1.1)
    plain = fit_calibration(DATA_SHEET, list(TRUE), runs, name="f", source="synthetic")
    shaped = fit_calibration(DATA_SHEET, list(TRUE), runs, name="f", source="synthetic", shapes=True)
    errors = [
        [abs(run.predict_s(one) / run.measured_s - 1) for run in runs if run.name.startswith("512")]
        for one in (plain, shaped)
    ]
    assert sum(errors[1]) < 0.6 * sum(errors[0])
    assert all(f"{run.shape_scope}/shape_time" in shaped.parameters for run in runs)
    assert shaped.relative_uncertainty("shape_time") < DATA_SHEET.relative_uncertainty("shape_time")


def test_a_fitted_chip_has_a_narrower_band_than_a_data_sheet():
    """An unknown chip gets an answer, with a wider band."""
    fitted = fit_calibration(DATA_SHEET, list(TRUE), runs_of(0.01), name="f", source="synthetic")
    width = {}
    for chip in ("A100", "BR106B"):
        answer = predict(plan_of(clusters="aa"), pool_of(chip), model_of(), fitted)
        width[chip] = answer.high_s / answer.low_s
    assert 1 < width["A100"] < width["BR106B"]


def test_predictions_are_never_compared_with_what_they_were_fitted_on():
    """A run of the fit is refused, by name; others pass."""
    fitted = fit_calibration(DATA_SHEET, ["matmul_share"], runs_of(0.0)[:2], name="f", source="s")
    with pytest.raises(InputError, match="was fitted on '512-1-1-8'"):
        fitted.require_unseen("512-1-1-8")
    fitted.require_unseen("another")


def test_a_chips_own_parameter_goes_before_that_of_all():
    """`H20/matmul_share` holds for H20, `matmul_share` for the others."""
    both = DATA_SHEET.with_values({"matmul_share": 0.5, "H20/matmul_share": 0.9})
    assert both.value("matmul_share", "H20") == 0.9
    assert both.value("matmul_share", "A100") == 0.5


def test_a_calibration_survives_its_file(tmp_path):
    """Written and read back it is the same; an unknown parameter is a mistake with a line."""
    made = Calibration(
        name="x",
        source="s",
        fitted_on=("run",),
        parameters={"a>b/wan_share": FittedParameter(value=0.5, relative=0.1)},
    )
    file = tmp_path / "c.yaml"
    save_calibration(made, file)
    assert load_calibration(file) == made
    file.write_text("version: 1\nname: x\nsource: s\nparameters: {speed: {value: 1, relative: 1}}\n")
    with pytest.raises(FileError, match="unknown parameter 'speed'"):
        load_calibration(file)
    with pytest.raises(FileError, match="cannot be written"):
        save_calibration(made, tmp_path / "no" / "c.yaml")


def test_nothing_to_fit_to_is_refused():
    """A fit needs a run, and a time above 0."""
    with pytest.raises(InputError, match="no runs with a positive time"):
        fit_calibration(DATA_SHEET, ["matmul_share"], [], name="f", source="s")
