"""`shared_token_loss`: cross entropy where each rank has the logits of a part of the vocabulary.

The logits are never gathered: three numbers a token cross between the ranks, not one per word. Source:
M. Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch

from isthmus.train.tensor_parallel.tensor_group import TensorGroup


def shared_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, first: int, group: TensorGroup, ignored: int
) -> torch.Tensor:
    """Return the sum (fp32, in nats) of cross entropies over the labels that are not `ignored`.

    `logits` is `[B, S, V']`, those of the tokens from `first` on; `labels` `[B, S]` of the whole vocabulary.
    Every rank gets the same sum, and the gradient of its own logits.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    result: torch.Tensor = _CrossEntropy.apply(flat, labels.reshape(-1), first, group, ignored)
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: TensorGroup, ignored: int
    ) -> torch.Tensor:
        """Return the sum over labels [N] for logits [N, V']."""
        shifted = logits - group.largest(logits.amax(-1)).unsqueeze(-1)
        place = labels - first
        mine = (place >= 0) & (place < logits.shape[-1])
        place = place.masked_fill(~mine, 0).unsqueeze(-1)
        target = shifted.gather(-1, place).squeeze(-1).masked_fill(~mine, 0.0)
        exponentials = shifted.exp()
        total, target = group.sum(torch.stack((exponentials.sum(-1), target)))
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), place, mine, labels != ignored)
        return (total.log() - target).masked_fill(labels == ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Return the gradient of the rank's own logits: probability less one at the label."""
        probabilities, place, mine, counted = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, place, -mine.unsqueeze(-1).to(probabilities.dtype))
        return gradient.mul_((gradients[0] * counted).unsqueeze(-1)), None, None, None, None
