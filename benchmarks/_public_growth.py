"""The rows that say how the error and the band of a public set change as a calibration sees more runs."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence

from benchmarks._public_run import PublicRun
from benchmarks.table import Row
from isthmus.core.stack import find_stack
from isthmus.plan import (
    DATA_SHEET,
    TIME_MODEL_PARAMETERS,
    Calibration,
    Observation,
    estimate_s,
    fit_calibration,
    with_prior_rates,
)
from isthmus.plan.time.calibration import ChipRates
from isthmus.plan.time.chip_rates import with_chip_rates
from isthmus.plan.time.predict import Z_90_PERCENT, relative_uncertainty

COUNTS, SEEDS = (0, 1, 2, 4, 8, 16), 6
"""Runs that a calibration sees, of orders drawn by this many seeds; the rest after the largest number is compared."""

FITTED = tuple(name for name in ChipRates.__dataclass_fields__ if TIME_MODEL_PARAMETERS[name].relative)
"""What is fitted of each chip: what `isthmus calibrate` fits."""


def calibrated_on(seen: Sequence[PublicRun]) -> Calibration:
    """Return the calibration of some runs by the closed form, as `isthmus calibrate` fits it; none for no runs."""
    if not seen:
        return DATA_SHEET

    def closed_form(run: PublicRun) -> Callable[[Calibration], float]:
        return lambda calibration: estimate_s(run.plan, run.pool, run.profile, calibration)

    chips = sorted({run.pool.clusters[0].node_groups[0].chip for run in seen})
    observed = [Observation(name=r.name, measured_s=r.measured_s or 0, predict_s=closed_form(r)) for r in seen]
    keys = [f"{chip}/{key}" for chip in chips for key in FITTED]
    keys += sorted({f"{find_stack(run.plan.stack).name}/stack_factor" for run in seen})
    start = with_prior_rates(DATA_SHEET, [(run.plan, run.pool) for run in seen], keys)
    return fit_calibration(start, keys, observed, name="public", source="public set")


def error_and_band(unseen: Sequence[PublicRun], calibration: Calibration) -> tuple[float, float]:
    """Return the mean error, and the share of runs within the 90 % band, both in per cent."""
    errors, held = [], []
    for run in unseen:
        calibration.require_unseen(run.name)
        ratio = estimate_s(run.plan, run.pool, run.profile, calibration) / (run.measured_s or 1)
        completed = with_chip_rates(calibration, run.plan, run.pool)
        spread = Z_90_PERCENT * relative_uncertainty(run.plan, run.pool, run.profile, completed)
        errors.append(abs(ratio - 1))
        held.append(abs(math.log(ratio)) <= spread)
    return 100 * statistics.fmean(errors), 100 * statistics.fmean(held)


def growth_rows(label: str, runs: Sequence[PublicRun]) -> list[Row]:
    """Return the rows of a set with more runs than the largest number seen, as means over the seeds."""
    ran = [run for run in runs if run.ran]
    if len(ran) < COUNTS[-1] + 4:
        return []
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
    for seed in range(SEEDS):
        order = random.Random(seed).sample(ran, len(ran))
        for count in COUNTS:
            found[count].append(error_and_band(order[COUNTS[-1] :], calibrated_on(order[:count])))
    errors = [statistics.fmean(error for error, _ in found[count]) for count in COUNTS]
    bands = [statistics.fmean(band for _, band in found[count]) for count in COUNTS]
    rise = max(b - a for a, b in itertools.pairwise(errors))
    counts = ", ".join(map(str, COUNTS))
    told = ", ".join(f"{error:.1f}" for error in errors)
    band = ", ".join(f"{share:.0f}" for share in bands)
    held = all(85 <= share <= 95 for share in bands[1:])
    return [
        Row(what=f"{label}: {counts} runs seen, closed form, mean errors {told} %: largest rise", ours=rise,
            unit="points", target="at most 1", met=rise <= 1),
        Row(what=f"{label}: the same, shares within the 90 % band {band} %: least after a run", ours=min(bands[1:]),
            unit="% of runs", target="85 to 95", met=held),
    ]  # fmt: skip
