"""`vocab_parallel_loss`: cross entropy of logits that are split over the vocabulary.

Ranks reduce three numbers per token instead of gathering the logits. Source: M. Shoeybi et al., "Megatron-LM"
(2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch

from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup


def vocab_parallel_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_token: int,
    group: TensorParallelGroup,
    ignored_label: int,
) -> torch.Tensor:
    """Return the cross entropies (fp32, in nats) [B S] of all labels, 0 for `ignored_label`.

    `logits` `[B, S, V / tp]` begin at token `first_token`; `labels` `[B, S]` are full-vocabulary ids. Each rank
    gets the same values, and the gradient of its own logits.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    result: torch.Tensor = _VocabParallelCrossEntropy.apply(flat, labels.reshape(-1), first_token, group, ignored_label)
    return result


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        first_token: int,
        group: TensorParallelGroup,
        ignored_label: int,
    ) -> torch.Tensor:
        """Return the cross entropies [N] for logits [N, V / tp] and labels [N]."""
        # Step 1: subtract the maximum over the full vocabulary.
        shifted = logits - group.all_reduce_max(logits.amax(-1)).unsqueeze(-1)
        # Step 2: pick the target logit where this rank has it, else 0.
        place = labels - first_token
        mine = (place >= 0) & (place < logits.shape[-1])
        place = place.masked_fill(~mine, 0).unsqueeze(-1)
        target = shifted.gather(-1, place).squeeze(-1).masked_fill(~mine, 0.0)
        # Step 3: reduce normaliser and target logit together.
        exponentials = shifted.exp()
        total, target = group.all_reduce_sum(torch.stack((exponentials.sum(-1), target)))
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), place, mine, labels != ignored_label)
        return (total.log() - target).masked_fill(labels == ignored_label, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        """Return the gradient of this rank's logits [N, V / tp]: softmax minus one-hot label."""
        probabilities, place, mine, counted = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, place, -mine.unsqueeze(-1).to(probabilities.dtype))
        return gradient.mul_((gradients[0] * counted).unsqueeze(-1)), None, None, None, None
