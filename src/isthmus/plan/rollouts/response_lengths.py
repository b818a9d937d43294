"""`response_lengths`: the lengths of responses that the planner counts with."""

from __future__ import annotations

import math

from isthmus.core.job_parts.rl_job import RlConfig

ASSUMED_MEAN = 0.25
"""Mean response over the longest, where none was measured.

`long-sequence-rl.txt`, 1.3: 7,345 of 32,768 tokens, and 10,119 of 34,816.
"""

_NUM_ASSUMED = 64


def response_lengths(rl: RlConfig) -> tuple[int, ...]:
    """Return measured lengths, or quantiles of an exponential distribution that the longest response cuts off."""
    if rl.lengths:
        return rl.lengths
    longest = rl.max_response_tokens
    quantiles = ((number + 0.5) / _NUM_ASSUMED for number in range(_NUM_ASSUMED))
    return tuple(min(longest, max(1, round(-ASSUMED_MEAN * longest * math.log1p(-one)))) for one in quantiles)
