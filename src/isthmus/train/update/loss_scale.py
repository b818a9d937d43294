"""`LossScale`: the factor by which fp16 gradients are kept away from zero, chosen by whether they overflow. Pure.

Source: P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
"""

from __future__ import annotations

import torch

from isthmus.core.errors import UnavailableError

INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24

GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles."""


class LossScale:
    """The scale of the next step, a power of two: halved after an overflow, doubled after `GROWTH_STEPS` without one.

    It follows from the gradient norms of all steps, which all ranks share, and so is the same at all of them.
    """

    def __init__(self) -> None:
        self.value = INITIAL_SCALE
        self.num_finite = 0

    def add_step(self, *, is_finite: bool) -> None:
        """Record whether the gradients of a step were finite."""
        if not is_finite:
            self.value, self.num_finite = max(self.value / 2, MIN_SCALE), 0
            return
        self.num_finite += 1
        if self.num_finite == GROWTH_STEPS:
            self.value, self.num_finite = min(self.value * 2, MAX_SCALE), 0

    def state(self) -> torch.Tensor:
        """Return scale and steps since the last overflow or change, fp32 [2]."""
        return torch.tensor([self.value, self.num_finite], dtype=torch.float32)

    def load_state(self, state: torch.Tensor) -> None:
        """Restore a result of `state`, fp32 [2]; raises `UnavailableError` for one that no run has."""
        value, num_finite = (float(one) for one in state.tolist())
        is_power = MIN_SCALE <= value <= MAX_SCALE and torch.frexp(torch.tensor(value)).mantissa.item() == 0.5
        if not (is_power and 0 <= num_finite < GROWTH_STEPS and num_finite == int(num_finite)):
            raise UnavailableError(
                f"the loss scale {value:g} after {num_finite:g} steps is no state of a run",
                hint="the checkpoint is damaged: resume from another one",
            )
        self.value, self.num_finite = value, int(num_finite)
