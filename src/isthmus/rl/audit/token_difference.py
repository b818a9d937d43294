"""`token_difference`: how far a claimed token and its log-probability are from what logits and seed give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from isthmus.serve import DecodeRequest, TokenDistribution, draw_number


@dataclass(frozen=True)
class TokenDifference:
    """Of one token: the difference of log-probabilities, and of its draw.

    log_probability:
        |claimed - recomputed|, in nats.
    draw:
        Distance of the number that was drawn from the interval of the token in the distribution, 0 inside; at
        temperature 0, how much less probable the token is than the most probable one.
    """

    log_probability: float
    draw: float


def token_difference(
    logits: np.ndarray, request: DecodeRequest, position: int, token: int, log_probability: float
) -> TokenDifference:
    """Return the difference of token number `position` of a response, claimed with `log_probability`.

    `logits` [V] are float32. As each token is drawn by a number that seed, prompt, sample and position give, a token
    that an engine has chosen otherwise lies outside its interval, but for a probability of `draw`.
    """
    found = TokenDistribution(logits, request.temperature)
    weights, sums = found.weights, found.sums
    if request.temperature > 0:
        drawn = draw_number(request, position) * sums[-1]
        below = sums[token] - weights[token] - drawn
        draw = max(below, drawn - sums[token], 0.0) / sums[-1]
    else:
        draw = (weights.max() - weights[token]) / sums[-1]
    apart = abs(log_probability - found.log_probability(token))
    return TokenDifference(apart if math.isfinite(apart) else math.inf, float(draw))
