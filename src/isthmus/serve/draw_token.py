"""`draw_token`: a token from logits, by one number that follows from seed, prompt, sample and position."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from isthmus.serve.batching.decode_records import DecodeRequest

_FRACTION_BITS = 53


def draw_token(logits: np.ndarray, request: DecodeRequest, position: int) -> tuple[int, float]:
    """Return token number `position` of a response and its log-probability, from float32 `logits` [V].

    The distribution is computed in float64 and inverted at a number in [0, 1) that SHA-256 makes of `request.seed`,
    prompt, sample and position. Raises `ValueError` for logits that are NaN, or of which none is finite.
    """
    scores = logits.astype(np.float64)
    if request.temperature > 0:
        scores /= request.temperature
    highest = scores.max()
    if not math.isfinite(highest):
        raise ValueError(f"the largest logit is {highest}")
    weights = np.exp(scores - highest)
    sums = np.cumsum(weights)
    if request.temperature > 0:
        # The first token whose sum lies above: it has a weight. Rounding may leave none; then the last with a weight.
        drawn = int(np.searchsorted(sums, draw_number(request, position) * sums[-1], side="right"))
        token = drawn if drawn < len(sums) else int(np.searchsorted(sums, sums[-1]))
    else:
        token = int(scores.argmax())
    return token, min(0.0, float(scores[token] - highest - math.log(sums[-1])))


def draw_number(request: DecodeRequest, position: int) -> float:
    """Return a number in [0, 1), uniform over seeds, prompts, samples and positions."""
    key = request.key
    text = f"isthmus draw 1 {request.seed} {key.prompt} {key.sample} {position}"
    bits = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> (64 - _FRACTION_BITS)
    return bits / 2.0**_FRACTION_BITS
