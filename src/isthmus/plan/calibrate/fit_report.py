"""`describe_fit`: what runs have taught a calibration, what they could not, and which runs its prior does not reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.plan.calibrate.fit_calibration import Observation
from isthmus.plan.time.calibration import Calibration, FittedParameter

LEARNED_SHARE = 0.8
"""A parameter is learned if its uncertainty fell below this share of what it was."""

UNREACHED_DEVIATIONS = 2.5
"""A run is out of the prior's reach if it is further away than this many standard deviations of its prediction."""


@dataclass(frozen=True, kw_only=True)
class LearnedParameter:
    """A fitted parameter: value and relative uncertainty before and after."""

    key: str
    before: FittedParameter
    after: FittedParameter

    @property
    def learned(self) -> bool:
        """Whether the runs made it more certain."""
        return self.after.relative < LEARNED_SHARE * self.before.relative


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """What a fit has found, beside the calibration itself."""

    learned: tuple[LearnedParameter, ...]
    not_learned: tuple[str, ...]
    """Keys on which the runs say little: they keep their priors."""
    errors: tuple[tuple[str, float], ...]
    """Each run with log(predicted / measured) under the fitted calibration."""
    warnings: tuple[str, ...]


def describe_fit(start: Calibration, made: Calibration, keys: Sequence[str], runs: Sequence[Observation]) -> FitReport:
    """Return the report on `made`, which was fitted to `runs` from `start` by `keys`."""
    rows = [
        LearnedParameter(
            key=key,
            before=FittedParameter(value=start.key_value(key), relative=start.key_relative(key)),
            after=FittedParameter(value=made.key_value(key), relative=made.key_relative(key)),
        )
        for key in keys
    ]
    return FitReport(
        learned=tuple(row for row in rows if row.learned),
        not_learned=tuple(row.key for row in rows if not row.learned),
        errors=tuple((run.name, math.log(run.predict_s(made) / run.measured_s)) for run in runs),
        warnings=tuple(text for run in runs if (text := _out_of_reach(start, keys, run))),
    )


def _out_of_reach(start: Calibration, keys: Sequence[str], run: Observation) -> str:
    """Return a warning if the prior makes a run most improbable, else an empty text."""
    off = math.log(run.measured_s / run.predict_s(start))
    deviation = predictive_std(start, (*keys, f"{run.shape_scope}/shape_time"), run.predict_s)
    if abs(off) <= UNREACHED_DEVIATIONS * deviation:
        return ""
    ratio, word = math.exp(abs(off)), "longer" if off > 0 else "shorter"
    return (
        f"run '{run.name}' took {ratio:.2g} times {word} than the prior predicts, which allows "
        f"{math.exp(UNREACHED_DEVIATIONS * deviation):.2g} times: the fit cannot reach it. Check its plan, chip and "
        "units, or widen the prior of what differs (`relative` of a parameter in a --base file)"
    )


def predictive_std(calibration: Calibration, keys: Sequence[str], predict_s: Callable[[Calibration], float]) -> float:
    """Return the relative standard deviation of a prediction: of the parameters `keys`, and of the runs' scatter."""
    base_s, effects = predict_s(calibration), list[tuple[str, float]]()
    for key in keys:
        if relative := calibration.key_relative(key):
            varied = calibration.with_values({key: calibration.key_value(key) * math.exp(relative)})
            effects.append((key, math.log(predict_s(varied) / base_s)))
    total = sum(effect * other * calibration.correlation(a, b) for a, effect in effects for b, other in effects)
    return math.sqrt(max(total, 0.0) + calibration.residual**2)
