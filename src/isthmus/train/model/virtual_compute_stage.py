"""`VirtualComputeStage`: a stage without weights or computation that outputs zeros of the real shapes.

The executor runs it like a real stage and sleeps for the predicted compute time. All micro-batches share one
output tensor, so only received tensors take memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isthmus.train.model.recompute import NO_RECOMPUTE, RecomputePolicy
from isthmus.train.model.stage_model import token_loss


class VirtualComputeStage(nn.Module):
    """Stand-in for a `StageModel` of decoder layers `layers` of a model of `num_layers`.

    Input: token ids [B, S] or hidden states [B, S, H]. Output: hidden states [B, S, H] of `dtype`; on the
    last stage dummy logits [B, 1, 1], whose loss is always 0.
    """

    tied = False
    balance_coefficient = 0.0
    architecture = "virtual"

    def __init__(
        self,
        layers: tuple[int, int],
        num_layers: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layers, self.hidden_size, self.dtype, self.device = layers, hidden_size, dtype, device
        self.is_first, self.is_last = layers[0] == 0, layers[1] == num_layers
        self.vocab_size = 1
        self._anchor = nn.Parameter(torch.zeros((), dtype=dtype, device=device))
        self._zeros = torch.zeros(0, dtype=dtype, device=device)

    def compute(
        self, x: torch.Tensor, _recompute: RecomputePolicy = NO_RECOMPUTE, _routing: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return zeros of the output shape for `x`, and no balance loss; recomputation only affects time."""
        shape = (x.shape[0], 1, 1) if self.is_last else (*x.shape[:2], self.hidden_size)
        out: torch.Tensor = _ZeroFunction.apply(x, self._anchor, self, shape)
        return out, None

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the dummy loss 0, a scalar; `logits` is [B, 1, 1], `labels` [B, S]."""
        return token_loss(logits, labels)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return read-only zeros of `shape`; all calls share their memory."""
        count = int(torch.Size(shape).numel())
        if self._zeros.numel() < count:
            self._zeros = torch.zeros(count, dtype=self.dtype, device=self.device)
        return self._zeros[:count].view(shape).detach()


class _ZeroFunction(torch.autograd.Function):
    """Outputs zeros forward and backward without arithmetic, in autograd's order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, stage: VirtualComputeStage, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return zeros of `shape`; `anchor` makes the result require a gradient."""
        del anchor
        ctx.stage, ctx.shape, ctx.differentiable = stage, x.shape, x.is_floating_point()
        return stage.zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Return zeros of the shape of `x`; None if `x` was token ids."""
        del gradients
        return (ctx.stage.zeros(ctx.shape) if ctx.differentiable else None), None, None, None
