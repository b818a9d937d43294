"""`correction`: weights that correct for the engine's policy being another one than the trainer's.

The engine that sampled and the trainer that computes `logp` round differently and may hold different versions, so a
token's importance ratio is `exp(logp - rollout_logp)`. Source: truncated importance sampling, "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (Yao et al., 2025); the masked form is IcePop (2025). A pair of
bounds masks, one bound truncates, as in `compute_rollout_correction_weights` of verl.
"""

from __future__ import annotations

from typing import Literal

import torch

from isthmus.core.errors import InputError
from isthmus.rl.check_inputs import check_log_probabilities, check_mask
from isthmus.rl.k3_penalty import LARGEST_LOG_RATIO


def correction(
    logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: Literal["token", "sequence"],
    truncate: float | tuple[float, float],
) -> torch.Tensor:
    """Return the weight of each token, [N, T], without gradient and 0 outside `mask`.

    level:
        `token`: the ratio of the token. `sequence`: the product of the ratios of the sample's tokens, for each of them.
    truncate:
        One bound: larger weights are cut to it. A pair (low, high): weights outside become 0.

    All tensors are [N, T]; `mask` is 1 for tokens that are trained on. Raises `InputError` for another level, bounds
    that are not positive and rising, and values that are no log-probabilities.
    """
    low, high = truncate if isinstance(truncate, tuple | list) else (None, truncate)
    if not 0 < high < float("inf") or (low is not None and not 0 <= low < high):
        raise InputError(
            f"correction.truncate is {truncate}",
            hint="use one bound above 0, such as 2.0, or a pair such as [0.5, 2.0]",
        )
    if level not in ("token", "sequence"):
        raise InputError(f"correction.level is '{level}'", hint="use token or sequence")
    valid = check_mask(mask)
    check_log_probabilities("logp", logp, valid)
    check_log_probabilities("rollout_logp", rollout_logp, valid)
    with torch.no_grad():
        log_ratio = torch.where(valid, logp - rollout_logp, 0.0)
        if level == "sequence":
            log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
        weights = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp() * valid
        if low is None:
            return weights.clamp(max=high)
        return weights * ((weights >= low) & (weights <= high))
