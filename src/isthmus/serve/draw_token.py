"""`draw_token`: a token from logits, by one number that follows from seed, prompt, sample and position."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from isthmus.serve.batching.decode_records import DecodeRequest

_FRACTION_BITS = 53


class TokenDistribution:
    """What logits [V] give each token, in float64.

    `scores` [V] are logits over the temperature, `weights` [V] probabilities times `sums[-1]`, and `sums` [V] those of
    the weights up to each token. Raises `ValueError` for logits that are NaN, or of which none is finite.
    """

    def __init__(self, logits: np.ndarray, temperature: float) -> None:
        self.scores = logits.astype(np.float64)
        if temperature > 0:
            self.scores /= temperature
        self._highest = self.scores.max()
        if not math.isfinite(self._highest):
            raise ValueError(f"the largest logit is {self._highest}")
        self.weights = np.exp(self.scores - self._highest)
        self.sums = np.cumsum(self.weights)

    def log_probability(self, token: int) -> float:
        """Return the log-probability of a token."""
        return min(0.0, float(self.scores[token] - self._highest - math.log(self.sums[-1])))


def draw_token(logits: np.ndarray, request: DecodeRequest, position: int) -> tuple[int, float]:
    """Return token number `position` of a response and its log-probability, from float32 `logits` [V].

    The distribution is computed in float64 and inverted at a number in [0, 1) that SHA-256 makes of `request.seed`,
    prompt, sample and position. Raises `ValueError` for logits that are NaN, or of which none is finite.
    """
    found = TokenDistribution(logits, request.temperature)
    sums = found.sums
    if request.temperature > 0:
        # The first token whose sum lies above: it has a weight. Rounding may leave none; then the last with a weight.
        drawn = int(np.searchsorted(sums, draw_number(request, position) * sums[-1], side="right"))
        token = drawn if drawn < len(sums) else int(np.searchsorted(sums, sums[-1]))
    else:
        token = int(found.scores.argmax())
    return token, found.log_probability(token)


def draw_number(request: DecodeRequest, position: int) -> float:
    """Return a number in [0, 1), uniform over seeds, prompts, samples and positions."""
    key = request.key
    text = f"isthmus draw 1 {request.seed} {key.prompt} {key.sample} {position}"
    bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> (64 - _FRACTION_BITS)
    return bits / 2.0**_FRACTION_BITS
