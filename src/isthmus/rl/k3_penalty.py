"""`k3_penalty`: an unbiased, never negative estimate of the divergence from a reference, per token.

Source: the estimator k3 of Schulman, "Approximating KL Divergence" (2020), as GRPO uses it (arXiv 2402.03300, equation
4). A difference of log-probabilities counts up to 20, as in verl: beyond it the exponential says nothing more.
"""

from __future__ import annotations

import torch

LARGEST_LOG_RATIO = 20.0
"""Bound of the logarithm of a ratio of probabilities before its exponential: e^20 is 5e8."""


def k3_penalty(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """Return `exp(d) - d - 1` with `d = ref_logp - logp`, of the shape [N, T] of both; its gradient is by `logp`."""
    difference = (ref_logp - logp).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return difference.exp() - difference - 1
