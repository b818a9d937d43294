"""`calibrate_shapes`: adds measured times of a model's parts, at one micro-batch size, to a calibration.

Each factor (layer, embedding, head, update) is the measured time over the roofline's time under the given
calibration. `step_s` is replaced.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.core.chip import Chip, Precision
from isthmus.core.pool import NodeGroup
from isthmus.plan.calibrate.micro_benchmarks import MIN_MESSAGE_S, MIN_RELATIVE_UNCERTAINTY, ShapeTiming
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.time.calibration import Calibration, FittedParameter
from isthmus.plan.time.stage_time import (
    ChipModel,
    MicroBatchShape,
    PassTime,
    embedding_pass_time,
    head_pass_time,
    pass_time,
    update_s,
)
from isthmus.plan.time.stage_work import layer_work
from isthmus.plan.time.time_model_parameters import shape_scope, vocabulary_scope


def calibrate_shapes(
    calibration: Calibration,
    chip: Chip,
    profile: ModelProfile,
    precision: Precision,
    measured: Sequence[ShapeTiming],
) -> Calibration:
    """Return `calibration` with the factors of `profile` from `measured` (concurrent copies of one shape)."""
    first = measured[0]
    batch = MicroBatchShape(
        micro_batch_size=first.micro_batch_size, sequence_length=first.sequence_length, precision=precision
    )
    host, share = _uncorrected_chip_model(calibration, chip), batch.per_chip(StageDegrees())
    size = profile.hidden_size, share.tokens
    ends = vocabulary_scope(chip.name, *size, profile.vocab_size)
    step = _MedianTime.of(measured, lambda one: one.step_s)
    update = _MedianTime.of(measured, lambda one: one.update_s)
    moved = _MedianTime(max(update.median_s - step.median_s, MIN_MESSAGE_S), update.spread_ratio)
    layer = pass_time(host, layer_work(profile.layers[1], share), precision)
    embedding = embedding_pass_time(profile, host, share, precision)
    head = head_pass_time(profile, host, share, precision)
    update_each_s = update_s(host, first.update_parameters, batch.precision_bytes)
    fitted = {
        f"{shape_scope(chip.name, *size, 1)}/shape_time": _MedianTime.of(measured, lambda one: one.layer_s).relative_to(
            _forward_backward_s(layer)
        ),
        f"{ends}/embedding_time": _MedianTime.of(measured, lambda one: one.embedding_s).relative_to(
            _forward_backward_s(embedding)
        ),
        f"{ends}/head_time": _MedianTime.of(measured, lambda one: one.head_s).relative_to(_forward_backward_s(head)),
        f"{chip.name}/update_time": moved.relative_to(update_each_s),
        f"{chip.name}/step_s": step.relative_to(1.0),
    }
    return calibration.model_copy(
        update={
            "parameters": {**calibration.parameters, **fitted},
            "fitted_on": (*calibration.fitted_on, f"parts-{ends}"),
        }
    )


def _uncorrected_chip_model(calibration: Calibration, chip: Chip) -> ChipModel:
    """Return the chip model without an earlier `update_time`, as the pure roofline."""
    group = NodeGroup(name="measured", chip=chip.name, nodes=1, chips_per_node=1)
    kept = {key: one for key, one in calibration.parameters.items() if not key.endswith("update_time")}
    return ChipModel.of(group, chip, calibration.model_copy(update={"parameters": kept}))


@dataclass(frozen=True)
class _MedianTime:
    """A median time in seconds, and its relative spread: half of the interquartile range."""

    median_s: float
    spread_ratio: float

    @classmethod
    def of(cls, measured: Sequence[ShapeTiming], read: Callable[[ShapeTiming], tuple[float, ...]]) -> _MedianTime:
        """Return the median over all repetitions and copies, since a training step is typical."""
        taken = [seconds for one in measured for seconds in read(one)]
        middle = statistics.median(taken)
        low, _, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else (middle, middle, middle)
        return cls(middle, (high - low) / 2 / middle)

    def relative_to(self, expected_s: float) -> FittedParameter:
        """Return the time as a factor on `expected_s`."""
        return FittedParameter(
            value=self.median_s / expected_s, relative=max(MIN_RELATIVE_UNCERTAINTY, self.spread_ratio)
        )


def _forward_backward_s(time: PassTime) -> float:
    return time.forward_s + time.backward_s
