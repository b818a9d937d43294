"""`judge_sample`: whether the differences of a sample are those of another chip's rounding, or of a forger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from isthmus.rl.audit.token_difference import TokenDifference


@dataclass(frozen=True, kw_only=True)
class AuditBounds:
    """Greatest differences that are no forgery: of a token's log-probability, of their mean, and of a draw."""

    log_probability: float
    mean_log_probability: float
    draw: float


FP32_BOUNDS = AuditBounds(log_probability=1e-3, mean_log_probability=2e-4, draw=2e-4)
"""Rounding of 32-bit floats: chips and libraries differ by some 1e-6."""
BF16_BOUNDS = AuditBounds(log_probability=0.5, mean_log_probability=0.12, draw=0.1)
"""Rounding of 16-bit floats."""


def judge_sample(differences: Sequence[TokenDifference], bounds: AuditBounds) -> tuple[int, str]:
    """Return the position of the first token that no honest engine gives, and what is wrong with it.

    Returns (-1, "") for a sample within the bounds. Where only the mean is too large, it is the position of the largest
    difference.
    """
    for position, one in enumerate(differences):
        if one.draw > bounds.draw:
            return position, f"token {position} is not the one drawn: {one.draw:.3g} of the distribution away"
        if one.log_probability > bounds.log_probability:
            return position, f"log-probability of token {position} differs by {one.log_probability:.3g}"
    apart = [one.log_probability for one in differences]
    if apart and fmean(apart) > bounds.mean_log_probability:
        return apart.index(max(apart)), f"log-probabilities differ by {fmean(apart):.3g} in the mean"
    return -1, ""
