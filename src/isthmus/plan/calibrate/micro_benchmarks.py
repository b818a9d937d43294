"""Calibration from micro-benchmarks of a chip or link; a worker measures them.

`python -m isthmus.train.measure.measure_chip` prints a `Measurement`, from which `calibrate_chip` derives a
calibration. Each parameter is the median over the benchmark sizes, its uncertainty their scatter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, PositiveFloat, PositiveInt
from isthmus.core.chip import Chip, Precision
from isthmus.plan.time.calibration import Calibration, FittedParameter
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS

MIN_RELATIVE_UNCERTAINTY = 0.03
"""Least relative uncertainty of a micro-benchmark, as training differs from it."""

MIN_MESSAGE_S = 1e-6
"""Least time of a message without its delay; smaller values are below the clock's resolution."""


class Timing(FrozenModel):
    """One micro-benchmark: operations done, bytes moved, and the seconds of each repetition."""

    name: str
    flops: float = 0.0
    num_bytes: float = 0.0
    count: PositiveInt = 1
    seconds: tuple[PositiveFloat, ...] = Field(min_length=1)

    @property
    def best_s(self) -> float:
        """The fastest repetition, which other load on the machine disturbs least."""
        return min(self.seconds)


class Measurement(FrozenModel):
    """All micro-benchmarks of one device."""

    version: Literal[1] = 1
    device: str
    precision: Precision
    matmul: tuple[Timing, ...] = Field(min_length=1)
    attention: tuple[Timing, ...] = ()
    memory: tuple[Timing, ...] = Field(min_length=1)
    launch: tuple[Timing, ...] = Field(min_length=1)
    shape: ShapeTiming | None = None


class ShapeTiming(FrozenModel):
    """The seconds of each repetition of a model's parts, timed separately.

    Layer, embedding and head (final norm, head and loss) are timed forward and backward together, for one
    micro-batch. `update_s` is an optimizer step over `update_parameters` elements; `step_s` is one over the
    same number of tensors with one element each.
    """

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    micro_batch_size: PositiveInt
    sequence_length: PositiveInt
    layer_s: tuple[PositiveFloat, ...] = Field(min_length=1)
    embedding_s: tuple[PositiveFloat, ...] = Field(min_length=1)
    head_s: tuple[PositiveFloat, ...] = Field(min_length=1)
    update_s: tuple[PositiveFloat, ...] = Field(min_length=1)
    update_parameters: PositiveInt
    step_s: tuple[PositiveFloat, ...] = Field(min_length=1)


def calibrate_chip(chip: Chip, measured: Measurement, *, name: str) -> Calibration:
    """Return the calibration of `chip` from `measured`: achieved shares of its data sheet, and launch time.

    A share above 1 is kept: the chip is then faster than its data sheet.
    """
    peak = chip.flop_per_s(measured.precision)
    rate = chip.memory_bandwidth_bytes_per_s
    shares = {
        "matmul_share": [t.flops / t.best_s / peak for t in measured.matmul],
        "attention_share": [t.flops / t.best_s / peak for t in measured.attention],
        "memory_share": [t.num_bytes / t.best_s / rate for t in measured.memory],
        "launch_s": [t.best_s / t.count for t in measured.launch],
    }
    kinds = (*measured.matmul, *measured.attention, *measured.memory, *measured.launch)
    return Calibration(
        name=name,
        source=f"micro-benchmarks of {measured.device} as {chip.name}, {measured.precision}",
        fitted_on=tuple(timing.name for timing in kinds),
        parameters={f"{chip.name}/{key}": _fitted_parameter(key, values) for key, values in shares.items() if values},
    )


def calibrate_links(
    calibration: Calibration,
    shares: Mapping[str, Sequence[float]],
    messages_s: Mapping[str, Sequence[float]] | None = None,
) -> Calibration:
    """Return `calibration` with the shares of the rate that flows reached on links, by `FROM>TO`.

    `messages_s` holds the times of single messages without delay and transfer.
    """
    fitted = {f"{ends}/wan_share": _fitted_parameter("wan_share", values) for ends, values in shares.items()}
    fitted |= {
        f"{ends}/message_s": _fitted_parameter("message_s", [max(one, MIN_MESSAGE_S) for one in values])
        for ends, values in (messages_s or {}).items()
    }
    return calibration.model_copy(
        update={
            "parameters": {**calibration.parameters, **fitted},
            "fitted_on": (*calibration.fitted_on, *(f"link-{ends}" for ends in shares)),
        }
    )


def _fitted_parameter(key: str, values: Sequence[float]) -> FittedParameter:
    value = statistics.median(values)
    scatter = TIME_MODEL_PARAMETERS[key].relative / 2
    if len(values) > 1:
        scatter = statistics.stdev(math.log(x) for x in values) / math.sqrt(len(values))
    return FittedParameter(value=value, relative=max(MIN_RELATIVE_UNCERTAINTY, scatter))
