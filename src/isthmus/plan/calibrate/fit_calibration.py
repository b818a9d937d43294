"""`fit_calibration`: parameters of the time model that measured runs make most probable, with their uncertainty.

The prior is the starting calibration: each parameter's value and uncertainty, its scatter, and how far shapes deviate.
So one run moves what it informs, and every further run moves it less. A chip's bias (`bias_factor`, the same for every
run on it) is fitted apart from the runs' scatter, and the effect of a layer's shape apart from both. Parameters that
the runs say nothing about keep their priors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError
from isthmus.plan.calibrate.posterior import MeasuredValue, Posterior, Prior
from isthmus.plan.time.calibration import Calibration, FittedParameter
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS

BIAS = "bias_factor"
BIAS_CORRELATION = 0.5
"""Prior correlation of the biases of two chips: half of a bias is assumed to be the model's, alike on all chips."""

MIN_CORRELATION = 0.02
"""Least correlation of two parameters that a calibration keeps."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A measured time and its model."""

    name: str
    measured_s: float
    predict_s: Callable[[Calibration], float]
    """Predicts the time in seconds under a calibration."""
    shape_scope: str = ""
    """Scope of the layers' shape (`shape_scope`), if they all have the same."""


def fit_calibration(
    start: Calibration,
    keys: Sequence[str],
    runs: Sequence[Observation],
    *,
    name: str,
    source: str,
    shapes: bool = False,
) -> Calibration:
    """Return `start` with `keys` fitted to `runs`, their uncertainties and correlations, and the runs' names.

    The biases of chips share a part: with that of any chip the general one, which counts for chips that no run used, is
    fitted as well. With `shapes` every layer shape of the runs gets a factor, and `shape_time` the uncertainty of
    others. Raises `InputError` without runs, or for a time that is not positive.
    """
    if not runs or any(not run.measured_s > 0 for run in runs):
        raise InputError("no runs with a positive time", hint="give at least one run with a time above 0")
    if BIAS not in keys and any(key.endswith(f"/{BIAS}") for key in keys):
        keys = (*keys, BIAS)
    scopes = tuple(dict.fromkeys(run.shape_scope for run in runs if run.shape_scope)) if shapes else ()
    from isthmus.plan.calibrate.find_posterior import find_posterior  # numpy, which only a fit needs

    found = find_posterior(measured_values(start, keys, runs, scopes), prior_of(start, keys))
    return _with_posterior(start, keys, runs, scopes, found).model_copy(update={"name": name, "source": source})


def prior_of(start: Calibration, keys: Sequence[str]) -> Prior:
    """Return the prior that a calibration is for `keys`, correlations of earlier fits included."""
    deviations = [max(start.key_relative(key), 1e-6) for key in keys]
    covariance = [
        [_prior_correlation(start, a, b) * da * db for b, db in zip(keys, deviations, strict=True)]
        for a, da in zip(keys, deviations, strict=True)
    ]
    shape_std = start.relative_uncertainty("shape_time")
    mean = tuple(math.log(start.key_value(key)) for key in keys)
    return Prior(mean=mean, covariance=covariance, scatter_std=start.residual, shape_std=shape_std)


def _prior_correlation(start: Calibration, a: str, b: str) -> float:
    """Return the correlation of two keys before a fit; biases that no fit has seen are related.

    Such a bias is a part that all chips share and one of its own, as the general bias is: where that was fitted, the
    new one has its covariance with the others, and with it the variance of the shared part.
    """
    new = [key for key in (a, b) if key not in start.parameters]
    if a == b or not new or any(key.rpartition("/")[2] != BIAS for key in (a, b)):
        return start.correlation(a, b)
    if BIAS not in start.parameters:
        return BIAS_CORRELATION if len(new) == 2 else 0.0
    known = [key for key in (a, b) if key in start.parameters and key != BIAS]
    if known:
        return start.correlation(BIAS, known[0])
    own = (1 - BIAS_CORRELATION) * TIME_MODEL_PARAMETERS[BIAS].relative ** 2
    return max(0.0, 1 - own / max(start.key_relative(BIAS), 1e-6) ** 2)


def measured_values(
    start: Calibration, keys: Sequence[str], runs: Sequence[Observation], scopes: Sequence[str]
) -> list[MeasuredValue]:
    """Return the runs as functions of the parameters' logarithms and of the effects of shapes `scopes`."""
    places = {scope: place for place, scope in enumerate(scopes)}

    def value(run: Observation) -> MeasuredValue:
        place = places.get(run.shape_scope)

        def predict(at: Sequence[float], effect: float) -> float:
            values = {key: math.exp(x) for key, x in zip(keys, at, strict=True)}
            if place is not None:
                values[f"{run.shape_scope}/shape_time"] = math.exp(effect)
            return run.predict_s(start.with_values(values))

        return MeasuredValue(measured=run.measured_s, predict=predict, shape=place)

    return [value(run) for run in runs]


def _with_posterior(
    start: Calibration, keys: Sequence[str], runs: Sequence[Observation], scopes: Sequence[str], found: Posterior
) -> Calibration:
    """Return `start` with the parameters, correlations and scatter of a posterior."""
    deviations = [math.sqrt(max(row[i], 0.0)) for i, row in enumerate(found.covariance)]
    fitted = {
        key: FittedParameter(value=math.exp(x), relative=deviation)
        for key, x, deviation in zip(keys, found.mean, deviations, strict=True)
    }
    correlations = {
        key: _correlations(found.covariance[i][:i], deviations[i], keys, deviations) for i, key in enumerate(keys)
    }
    rows = zip(scopes, found.shapes, found.shape_variance, found.shape_covariance, strict=True)
    for scope, effect, variance, row in rows:
        key, deviation = f"{scope}/shape_time", math.sqrt(max(variance, 0.0))
        fitted[key] = FittedParameter(value=math.exp(effect), relative=deviation)
        correlations[key] = _correlations(row, deviation, keys, deviations)
    if scopes:
        fitted["shape_time"] = FittedParameter(value=start.value("shape_time"), relative=found.shape_std)
    kept = {key: row for key, row in start.correlations.items() if key not in correlations}
    return start.model_copy(
        update={
            "fitted_on": (*start.fitted_on, *(run.name for run in runs)),
            "parameters": {**start.parameters, **fitted},
            "correlations": kept | {key: row for key, row in correlations.items() if row},
            "residual": found.scatter_std,
        }
    )


def _correlations(
    covariances: Sequence[float], deviation: float, keys: Sequence[str], deviations: Sequence[float]
) -> dict[str, float]:
    found = {
        key: covariance / (deviation * other)
        for key, covariance, other in zip(keys, covariances, deviations, strict=False)
        if deviation > 0 and other > 0
    }
    return {key: max(-1.0, min(1.0, value)) for key, value in found.items() if abs(value) >= MIN_CORRELATION}
