"""`check_rewards` and `check_log_probabilities`: named errors for values that no loss may silently take in."""

from __future__ import annotations

import torch

from isthmus.core.errors import InputError

ROUNDING = 1e-4
"""Largest log-probability that counts as 0: in float32, logits up to 1,000 less their log-sum round to within 6e-5."""


def check_rewards(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return `rewards` [N] as groups [N / group, group]; consecutive rewards are of one prompt.

    Raises `InputError` for a group below 2, an N that is no multiple of it, and rewards that are not finite.
    """
    if group < 2:
        raise InputError(
            f"group {group}: a group of 1 has no mean to compare with", hint="use at least 2 samples a prompt"
        )
    if rewards.dim() != 1 or rewards.numel() % group:
        raise InputError(
            f"rewards of shape {list(rewards.shape)} are not whole groups of {group}",
            hint="pass one reward a sample, [N], with the samples of a prompt side by side",
        )
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        index = int((~finite).nonzero()[0])
        raise InputError(
            f"reward {float(rewards[index])} of sample {index} is not finite",
            hint="give the sample the fate failed, or fix the reward function",
        )
    return rewards.reshape(-1, group)


def check_log_probabilities(name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise `InputError` unless `values` [N, T] has the shape of `mask` [N, T] and is at most 0 where the mask is set.

    Values outside the mask may be anything, NaN included. Minus infinity and NaN under the mask are refused.
    """
    if values.shape != mask.shape or mask.dim() != 2:
        raise InputError(
            f"{name} has shape {list(values.shape)}, the mask {list(mask.shape)}", hint="pass both as [N, T]"
        )
    wrong = mask & ~((values <= ROUNDING) & torch.isfinite(values))
    if bool(wrong.any()):
        row, column = (int(one) for one in wrong.nonzero()[0])
        raise InputError(
            f"{name}[{row}, {column}] is {float(values[row, column])}, which is no log-probability",
            hint="a log-probability is finite and at most 0: pass logarithms of the sampled tokens' probabilities",
        )


def check_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return `mask` [N, T] as booleans; raises `InputError` for values other than 0 and 1, and for no token at all."""
    as_bool = mask.bool()
    if mask.dtype != torch.bool and not bool((mask == as_bool).all()):
        raise InputError("the mask has values other than 0 and 1", hint="set 1 for tokens to train on, 0 for others")
    if not bool(as_bool.any()):
        raise InputError("the mask has no token to train on", hint="skip a batch of which all samples were dropped")
    return as_bool
