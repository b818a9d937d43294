"""`TrainingWorkload`: the training workload, independent of where it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from isthmus.core.chip import Precision
from isthmus.plan.memory.stage_memory import COMPUTE_BYTES, OUTER_OPTIMIZER_BYTES, state_bytes
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.time.calibration import Calibration

ZeroStage = Literal[0, 1, 2, 3]
"""Stage of the ZeRO optimizer; 0: off."""

REDUCED_RATIO: dict[int, float] = {0: 1.0, 1: 0.75, 2: 0.75, 3: 0.5}
"""Bytes that the reduction of gradients sends over those of an all-reduce in fp32: ZeRO reduce-scatters gradients and
gathers weights of half their size, ZeRO 3 in the passes instead."""


@dataclass(frozen=True)
class TrainingWorkload:
    """The model, the batch and the calibration of costs, independent of the pool."""

    profile: ModelProfile
    sequence_length: int
    precision: Precision
    calibration: Calibration
    # Steps between parameter averages; above 1 every layout has several connected sets of replica groups.
    local_steps: int = field(default=1, kw_only=True)
    optimizer_on_host: bool = field(default=False, kw_only=True)
    # A frozen copy of the first weights, for the penalty of reinforcement learning.
    reference_model: bool = field(default=False, kw_only=True)

    @cached_property
    def equal_layers(self) -> bool:
        """Whether all decoder layers are equal."""
        return len(self.layer_kinds) == 1

    @cached_property
    def layer_kinds(self) -> tuple[LayerProfile, ...]:
        """The distinct layers (equal ones are one object)."""
        return tuple({id(layer): layer for layer in self.profile.layers}.values())

    @cached_property
    def equal_suffix_start(self) -> tuple[int, ...]:
        """By layer: the first one, from 1 on, that is followed by the same layers, shape [num_layers]."""
        layers = [id(layer) for layer in self.profile.layers]
        count = len(layers)
        return tuple(
            next((one for one in range(1, first) if layers[one : one + count - first] == layers[first:]), first)
            for first in range(count)
        )

    @property
    def static_bytes(self) -> tuple[float, float, float]:
        """Bytes per parameter on the chip of weights, gradients and optimizer, reference and averages included."""
        each = state_bytes(self.profile, self.stored_precision)
        weights = each.weights + COMPUTE_BYTES[self.stored_precision] * self.reference_model
        if self.optimizer_on_host:
            return weights, each.gradients, 0.0
        return weights, each.gradients, each.optimizer + OUTER_OPTIMIZER_BYTES * (self.local_steps > 1)

    @property
    def reserved_ratio(self) -> float:
        """Bytes that the allocator needs at least over those in use."""
        return 1.0 + self.profile.stack.allocator.least_share

    @property
    def stored_precision(self) -> Literal["fp32", "bf16"]:
        """Precision of the stored weights as `stage_memory` names it."""
        return "fp32" if self.precision in ("fp32", "tf32") else "bf16"
