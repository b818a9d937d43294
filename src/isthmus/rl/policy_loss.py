"""`policy_loss`: the clipped policy-gradient loss of GRPO, DAPO and Dr. GRPO.

Sources: the clipped ratio of PPO (arXiv 1707.06347, equation 7); separate bounds below and above, and the mean over all
tokens of a batch, of DAPO (arXiv 2503.14476, equations 8 to 12); the bound on negative advantages of dual-clip PPO
(arXiv 1912.09729, equation 5); the mean of each sample's mean, with the penalty k3 inside the loss, of GRPO (arXiv
2402.03300); the constant divisor of Dr. GRPO (arXiv 2503.20783).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from isthmus.core.errors import InputError
from isthmus.rl.check_inputs import check_log_probabilities, check_mask
from isthmus.rl.k3_penalty import LARGEST_LOG_RATIO, k3_penalty


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float | Sequence[float],
    clip_dual: float | None,
    aggregate: Literal["token", "sequence", "constant"],
    weights: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    kl: float = 0.0,
) -> torch.Tensor:
    """Return the loss, a scalar with a gradient by `logp`.

    logp, old_logp:
        [N, T] log-probabilities of the sampled tokens, now and under the policy to be clipped against: the one that
        sampled them.
    advantages:
        [N], or [N, T].
    mask:
        [N, T], 1 for tokens to train on; values elsewhere may be anything and get no gradient.
    clip:
        The ratio counts from `1 - low` to `1 + high`: a pair (low, high), or one value for both.
    clip_dual:
        Where the advantage is negative a ratio counts up to this; None: without bound.
    aggregate:
        `token`: the sum over the tokens of the batch, by their number (DAPO). `sequence`: the mean over the N samples
        of the mean over each one's tokens (GRPO). `constant`: the sum, by N times T (Dr. GRPO).
    weights:
        [N, T] factors of the tokens' losses (`correction`), taken as constants. The penalty is not multiplied.
    ref_logp, kl:
        With `kl` above 0, `kl` times `k3_penalty(logp, ref_logp)` is added to each token's loss.

    Raises `InputError` for bounds out of range, an unknown aggregate, shapes that differ, values under the mask that
    are not finite, and log-probabilities above 0.
    """
    loss = policy_token_losses(
        logp, old_logp, advantages, mask, clip=clip, clip_dual=clip_dual, weights=weights, ref_logp=ref_logp, kl=kl
    )  # fmt: skip
    return _aggregated(loss, mask.bool(), aggregate)


def policy_token_losses(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float | Sequence[float],
    clip_dual: float | None,
    weights: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    kl: float = 0.0,
) -> torch.Tensor:
    """Return the loss of each token, [N, T], 0 outside `mask`; arguments and errors as in `policy_loss`."""
    low, high = _bounds(clip, clip_dual)
    _check_penalty(kl, ref_logp)
    valid = check_mask(mask)
    check_log_probabilities("logp", logp.detach(), valid)
    check_log_probabilities("old_logp", old_logp, valid)
    advantage = _per_token("advantages", advantages, valid)
    # Outside the mask both are 0, so that NaN there has neither a value nor a gradient.
    now = torch.where(valid, logp, 0.0)
    log_ratio = now - torch.where(valid, old_logp, 0.0).detach()
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    if clip_dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * clip_dual), loss)
    if weights is not None:
        loss = loss * _per_token("weights", weights, valid)
    if kl > 0 and ref_logp is not None:
        check_log_probabilities("ref_logp", ref_logp, valid)
        loss = loss + kl * k3_penalty(now, torch.where(valid, ref_logp, 0.0).detach())
    return torch.where(valid, loss, 0.0)


def _aggregated(loss: torch.Tensor, valid: torch.Tensor, aggregate: str) -> torch.Tensor:
    """Return the scalar of a loss [N, T] that is 0 outside `valid` [N, T]."""
    if aggregate == "token":
        return loss.sum() / valid.sum()
    if aggregate == "sequence":
        return (loss.sum(dim=1) / valid.sum(dim=1).clamp(min=1)).mean()
    if aggregate == "constant":
        return loss.sum() / loss.numel()
    raise InputError(f"aggregate is '{aggregate}'", hint="use token, sequence or constant")


def _per_token(name: str, values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return `values` [N] or [N, T] as constants [N, T], 0 outside `valid`; refuse what is not finite inside."""
    spread = values.detach()[:, None].expand(valid.shape) if values.shape == valid.shape[:1] else values.detach()
    if spread.shape != valid.shape:
        raise InputError(
            f"{name} has shape {list(values.shape)}, the mask {list(valid.shape)}", hint="pass [N, T], or [N]"
        )
    inside = torch.where(valid, spread, 0.0)
    if not bool(torch.isfinite(inside).all()):
        raise InputError(f"{name} has NaN or infinity", hint="drop the samples whose reward failed")
    return inside


def _bounds(clip: float | Sequence[float], clip_dual: float | None) -> tuple[float, float]:
    pair = [float(one) for one in clip] if isinstance(clip, Sequence) else [float(clip)] * 2
    if len(pair) != 2 or not all(0 < one < 1 for one in pair):
        raise InputError(f"clip is {clip}", hint="use values inside (0, 1): one, or a pair such as [0.2, 0.28]")
    if clip_dual is not None and not clip_dual > 1:
        raise InputError(f"clip_dual is {clip_dual}", hint="use a ratio above 1, such as 3.0, or null for no bound")
    return pair[0], pair[1]


def _check_penalty(kl: float, ref_logp: torch.Tensor | None) -> None:
    if not 0 <= kl < float("inf"):
        raise InputError(f"kl is {kl}", hint="use 0 for no penalty, or a factor such as 0.04")
    if kl > 0 and ref_logp is None:
        raise InputError(f"kl is {kl} without ref_logp", hint="pass the reference's log-probabilities, or kl=0.0")
