"""`overlong_penalty`: what a sample loses for coming close to the longest response.

Source: soft overlong punishment, equation 13 of DAPO (arXiv 2503.14476): 0 up to `max_response_tokens - buffer`, then a
straight line down to `-penalty` at `max_response_tokens`, and `-penalty` beyond.
"""

from __future__ import annotations

import torch

from isthmus.core.errors import InputError


def overlong_penalty(
    num_tokens: torch.Tensor, max_response_tokens: int, *, buffer: int, penalty: float
) -> torch.Tensor:
    """Return what to add to the reward of each sample, [N], 0 or less; `num_tokens` [N] are response lengths.

    Raises `InputError` for a buffer outside 1 to `max_response_tokens`, and for a penalty below 0.
    """
    if not 1 <= buffer <= max_response_tokens:
        raise InputError(
            f"an overlong buffer of {buffer} tokens in {max_response_tokens}", hint="use 1 to max_response_tokens"
        )
    if not 0 <= penalty < float("inf"):
        raise InputError(f"an overlong penalty of {penalty}", hint="use 0 or more: it is subtracted")
    exceeded = num_tokens - (max_response_tokens - buffer)
    return -penalty * (exceeded / buffer).clamp(0, 1)
