"""`advantages`: rewards of samples relative to the other samples of their prompt.

Source: GRPO, section 4.1.2 of DeepSeekMath (arXiv 2402.03300): A = (r - mean) / std over the group. Without the
division by the deviation it is Dr. GRPO (arXiv 2503.20783). The deviation is the unbiased one, as in verl and TRL.
"""

from __future__ import annotations

import torch

from isthmus.rl.check_inputs import check_rewards


def advantages(rewards: torch.Tensor, group: int, by_std: bool = True, epsilon: float = 1e-6) -> torch.Tensor:
    """Return the advantage of each sample, [N]; `rewards` [N] has the `group` samples of a prompt side by side.

    `(r - mean) / (std + epsilon)` over the group, or `r - mean` without `by_std`. Equal rewards give 0. Raises
    `InputError` for a group below 2, an N that is no multiple of it, and rewards that are not finite.
    """
    groups = check_rewards(rewards, group)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if by_std:
        centred = centred / (groups.std(dim=1, keepdim=True) + epsilon)
    return centred.reshape(-1)
