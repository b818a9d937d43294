"""`fit_memory`: factors on activations, and bytes outside the allocator, from what runs have held.

A run's peak is that of its fullest chip: static bytes + activations in flight x `activation_memory`, as the allocator
counts; what the device reports adds the allocator's reserve and `outside_memory_bytes` (contexts, buffers of
communication). The fit is that of times (`posterior`): log-normal priors, one scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.calibrate.measured_runs import PlannedRun
from isthmus.plan.calibrate.posterior import MeasuredValue, Prior
from isthmus.plan.memory.plan_stage_memory import plan_stage_memory
from isthmus.plan.profile.planned_profile import planned_profile
from isthmus.plan.time.calibration import DATA_SHEET, Calibration, FittedParameter
from isthmus.plan.time.predict import simulate_plan

OUTSIDE_BYTES, OUTSIDE_RELATIVE = 1.5e9, 0.7
"""Prior of what lies outside the allocator: a CUDA context with its libraries takes 0.5 to 4 GB."""

MEMORY_SCATTER = 0.03
"""Prior relative scatter of peaks: their sizes are counted, not timed."""


@dataclass(frozen=True)
class _StagePeak:
    """A stage at its peak: static bytes, activations of all in flight, and reserved over allocated bytes."""

    static_bytes: float
    activation_bytes: float
    reserve_ratio: float

    def allocated_bytes(self, factor: float) -> float:
        return self.static_bytes + self.activation_bytes * factor


def fit_memory(start: Calibration, runs: Sequence[PlannedRun]) -> Calibration:
    """Return `start` with the memory factors of each chip that runs with a measured peak use; unchanged without any.

    A run whose stages are on several chips informs none of them: which chip's peak was the largest is not known.
    """
    made = start
    measured = [run for run in runs if run.run.allocated_bytes or run.run.device_bytes]
    for chip in dict.fromkeys(run.chips[0] for run in measured if len(run.chips) == 1):
        made = _fit_chip(made, chip, [run for run in measured if run.chips == (chip,)])
    return made


def _fit_chip(start: Calibration, chip: str, runs: Sequence[PlannedRun]) -> Calibration:
    factor_key, outside_key = f"{chip}/activation_memory", f"{chip}/outside_memory_bytes"
    known = outside_key in start.parameters
    outside = start.key_value(outside_key) if known else OUTSIDE_BYTES
    deviations = (start.key_relative(factor_key), start.key_relative(outside_key) if known else OUTSIDE_RELATIVE)
    values = [value for run in runs for value in _measured_values(run)]
    prior = Prior(
        mean=(math.log(start.key_value(factor_key)), math.log(outside)),
        covariance=[[deviations[0] ** 2, 0.0], [0.0, deviations[1] ** 2]],
        scatter_std=MEMORY_SCATTER,
        shape_std=1.0,
    )
    from isthmus.plan.calibrate.find_posterior import find_posterior  # numpy, which only a fit needs

    found = find_posterior(values, prior)
    fitted = {
        factor_key: FittedParameter(value=math.exp(found.mean[0]), relative=math.sqrt(found.covariance[0][0])),
    }
    if any(run.run.device_bytes for run in runs):
        fitted[outside_key] = FittedParameter(value=math.exp(found.mean[1]), relative=math.sqrt(found.covariance[1][1]))
    return start.model_copy(update={"parameters": {**start.parameters, **fitted}, "memory_residual": found.scatter_std})


def _measured_values(run: PlannedRun) -> list[MeasuredValue]:
    peaks, found = _stage_peaks(run), []
    if run.run.allocated_bytes:

        def allocated(at: Sequence[float], _: float) -> float:
            return max(peak.allocated_bytes(math.exp(at[0])) for peak in peaks)

        found.append(MeasuredValue(measured=run.run.allocated_bytes, predict=allocated))
    if run.run.device_bytes:

        def used(at: Sequence[float], _: float) -> float:
            held = max(peak.allocated_bytes(math.exp(at[0])) * peak.reserve_ratio for peak in peaks)
            return held + math.exp(at[1])

        found.append(MeasuredValue(measured=run.run.device_bytes, predict=used))
    return found


def _stage_peaks(run: PlannedRun) -> list[_StagePeak]:
    """Return every stage's peak without memory factors: how many micro-batches are in flight depends on none."""
    result, _ = simulate_plan(run.plan, run.pool, run.profile, DATA_SHEET)
    profile = planned_profile(run.profile, run.plan)
    found, simulated = [], iter(result.stages)
    for replica in range(run.plan.dp):
        stages = run.plan.pipeline(replica)
        for index in range(len(stages)):
            memory, peak = plan_stage_memory(run.plan, profile, stages, index), next(simulated).peak_memory_bytes
            static_bytes, ratio = (
                memory.static_bytes + memory.buffers_bytes,
                memory.total_bytes / memory.allocated_bytes,
            )
            found.append(_StagePeak(static_bytes, peak / ratio - static_bytes, ratio))
    return found
