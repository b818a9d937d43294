"""`VirtualStage`: a stage that computes nothing. It hands on tensors of the real size, and holds no weights.

The executor runs it like any other stage, and waits for the time that the stage's chips would take. All that
it hands on is one tensor of zeros, shared by all micro-batches: what takes memory is what was received.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isthmus.train.model.recompute import KEEP_ALL, Recomputation
from isthmus.train.model.stage_model import token_loss


class VirtualStage(nn.Module):
    """The shapes of decoder layers `layers` of a model of `num_layers`: what `StageModel` shows, without it.

    Takes token ids [B, S] or hidden states [B, S, H]; hands on hidden states [B, S, H] of `dtype`, and from
    the last stage logits of a single token and place [B, 1, 1], whose loss is 0 and means nothing.
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

    def compute(self, x: torch.Tensor, _: Recomputation = KEEP_ALL) -> tuple[torch.Tensor, None]:
        """Return what a stage given `x` hands on, and no balance loss; recomputation is a matter of time."""
        shape = (x.shape[0], 1, 1) if self.is_last else (*x.shape[:2], self.hidden_size)
        out: torch.Tensor = _Nothing.apply(x, self._anchor, self, shape)
        return out, None

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss, which is 0 and means nothing."""
        return token_loss(logits, labels)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return zeros of `shape`: always the same memory, so nobody may write to it."""
        count = int(torch.Size(shape).numel())
        if self._zeros.numel() < count:
            self._zeros = torch.zeros(count, dtype=self.dtype, device=self.device)
        return self._zeros[:count].view(shape).detach()


class _Nothing(torch.autograd.Function):
    """No arithmetic forward and none backward; autograd sees to it that each happens in its turn."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, stage: VirtualStage, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return zeros of `shape`. With `anchor`, which requires a gradient, so does the result."""
        del anchor
        ctx.stage, ctx.shape, ctx.differentiable = stage, x.shape, x.is_floating_point()
        return stage.zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Return zeros of the shape of `x`, or nothing where it was token ids."""
        del gradients
        return (ctx.stage.zeros(ctx.shape) if ctx.differentiable else None), None, None, None
