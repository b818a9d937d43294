"""`aggregate_weights`: the share of each token's loss in the loss of a step.

`policy_loss` takes means over the samples that it gets; a step over several ranks takes them over all samples of the
step. The sum of the tokens' losses times these weights, over all ranks, is that mean.
"""

from __future__ import annotations

from typing import Literal

import torch

from isthmus.rl.check_inputs import check_mask


def aggregate_weights(
    mask: torch.Tensor, aggregate: Literal["token", "sequence", "constant"], max_tokens: int
) -> torch.Tensor:
    """Return [N, T] weights in float64, 0 outside `mask` [N, T], which has all samples of the step.

    `max_tokens` is the T of `constant`: the longest response. Raises `InputError` for a mask without a token.
    """
    valid = check_mask(mask).double()
    if aggregate == "token":
        return valid / valid.sum()
    if aggregate == "sequence":
        return valid / valid.sum(dim=1, keepdim=True).clamp(min=1) / len(valid)
    return valid / (len(valid) * max_tokens)
