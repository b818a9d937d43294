"""`advise_sequences`: the most sequences that a chip decodes at once without evicting any from its cache.

Extends the estimate by distribution (`long-sequence-rl.txt`, 2.1; `plan/memory/kv_cache_limits.py`), in which all
sequences begin together, to continuous batching: a slot that is free takes the next sample at once.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

PAGE_TOKENS = 16
"""Tokens of a page of the engine's cache."""
MAX_SEQUENCES = 256
"""Most sequences that an engine of the runtime decodes at once."""

_NUM_DRAWS = 8
_MAX_SAMPLES = 2048
_MARGIN = 0.2
"""Other draws than those that were tried have higher peaks: by this over the root of the sequences."""


def advise_sequences(
    cache_tokens: float, prompt_tokens: int, lengths: Sequence[int], num_samples: int, most: int = MAX_SEQUENCES
) -> int:
    """Return the sequences at once, at most `most`, that fit a cache of `cache_tokens`; 0 if not even one does.

    `num_samples` samples, whose lengths are drawn from `lengths`, go through the engine one after another as slots
    become free.
    """
    drawn = random.Random(0)  # noqa: S311 - seeded, so that plans repeat; no secret
    count = max(1, min(num_samples, _MAX_SAMPLES))
    draws = [drawn.choices(lengths, k=count) for _ in range(_NUM_DRAWS)]
    most = min(most, count)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        longest = min(
            middle * (prompt_tokens + max(lengths)),
            _peak(draws, middle, prompt_tokens) * (1 + _MARGIN / math.sqrt(middle)),
        )
        rounded = PAGE_TOKENS * (middle / 2 + math.sqrt(middle))  # last pages are half full, give or take
        if longest + min(rounded, middle * PAGE_TOKENS) <= cache_tokens:
            low = middle
        else:
            high = middle - 1
    return low


def _peak(draws: Sequence[Sequence[int]], slots: int, prompt_tokens: int) -> float:
    """Return the most tokens that are cached at once in any draw."""
    return max(_peak_of(one, slots, prompt_tokens) for one in draws)


def _peak_of(lengths: Sequence[int], slots: int, prompt_tokens: int) -> int:
    """Return the peak of one draw: tokens only grow between ends, so it is at an end."""
    running: list[tuple[int, int]] = []  # (end, length)
    begins, peak = 0, 0  # `begins`: sum of the steps at which those that run began, less their prompts
    for length in lengths:
        now = 0
        if len(running) == slots:
            now, ended = heapq.heappop(running)
            peak = max(peak, (len(running) + 1) * now - begins)
            begins -= now - ended - prompt_tokens
        heapq.heappush(running, (now + length, length))
        begins += now - prompt_tokens
    while running:
        now, ended = heapq.heappop(running)
        peak = max(peak, (len(running) + 1) * now - begins)
        begins -= now - ended - prompt_tokens
    return peak
