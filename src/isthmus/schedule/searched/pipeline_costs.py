"""`PipelineCosts`: what a search for a schedule knows of a pipeline: seconds, memory and links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.core.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """One stage. Seconds are those of one micro-batch through all chunks of the stage."""

    forward_s: float
    backward_input_s: float
    """Time of the gradient for the previous stage."""
    backward_weight_s: float
    """Time of the weight gradients."""
    max_in_flight: int
    """Micro-batches whose activations fit, from their forward to their weight gradients (at least 1)."""
    splits_backward: bool = True
    """Whether weight gradients may be computed apart from the gradient for the previous stage."""
    tail_s: float = 0.0
    """Time from the last weight gradient to the end of the step: reduction and update."""

    @property
    def pass_s(self) -> float:
        """Seconds of a forward and a whole backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Messages from one stage to another: each occupies its link for `transfer_s` and arrives `delay_s` later."""

    delay_s: float
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of a message on an idle link."""
        return self.delay_s + self.transfer_s


NO_HOP = Hop(delay_s=0.0)
"""A message that takes no time."""


@dataclass(frozen=True, kw_only=True)
class PipelineCosts:
    """A pipeline of stages and its hops by (sending stage, receiving stage); a missing pair takes no time.

    Each hop has its link alone, first in, first out. Raises `PlanError` for a negative or infinite time, and for a
    stage without memory for one micro-batch.
    """

    stages: tuple[StageCosts, ...]
    hops: Mapping[tuple[int, int], Hop] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a pipeline without stages", hint="give at least one stage")
        for index, one in enumerate(self.stages):
            for name in ("forward_s", "backward_input_s", "backward_weight_s", "tail_s"):
                _require_time(f"stage {index}: {name}", getattr(one, name))
            if one.max_in_flight < 1:
                raise PlanError(
                    f"stage {index}: max_in_flight is {one.max_in_flight}",
                    hint="one micro-batch must fit: recompute more layers, or use more stages",
                )
        for (sender, receiver), hop in self.hops.items():
            _require_time(f"hop {sender}>{receiver}: delay_s", hop.delay_s)
            _require_time(f"hop {sender}>{receiver}: transfer_s", hop.transfer_s)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def hop(self, sender: int, receiver: int) -> Hop:
        """Return the hop between two stages."""
        return self.hops.get((sender, receiver), NO_HOP)


def _require_time(name: str, value_s: float) -> None:
    if not (math.isfinite(value_s) and value_s >= 0):
        raise PlanError(f"{name} is {value_s}", hint="times are finite and at least 0")
