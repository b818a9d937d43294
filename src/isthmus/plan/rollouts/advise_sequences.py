"""`advise_sequences`: the most sequences that a chip decodes at once without evicting any from its cache.

Extends the estimate by distribution (`long-sequence-rl.txt`, 2.1; `plan/memory/kv_cache_limits.py`), in which all
sequences begin together, to continuous batching: a slot that is free takes the next sample as soon as the engine
admits it.
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

    They fit on average, and the engine, which admits none that others may have to give way for, evicts none.

    `num_samples` samples, whose lengths are drawn from `lengths`, go through the engine one after another as slots
    become free.
    """
    drawn = random.Random(0)  # noqa: S311 - seeded, so that plans repeat; no secret
    count = max(1, min(num_samples, _MAX_SAMPLES))
    draws = [drawn.choices(lengths, k=count) for _ in range(_NUM_DRAWS)]
    # What a sequence has on average when it is looked at: half of what a length-biased one will have.
    mean = prompt_tokens + sum(one * one for one in lengths) / (2 * sum(lengths))
    most = min(most, count, int(cache_tokens / mean))
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        rounded = PAGE_TOKENS * (middle / 2 + math.sqrt(middle))  # last pages are half full, give or take
        room = cache_tokens - min(rounded, middle * PAGE_TOKENS)
        always = middle * (prompt_tokens + max(lengths)) <= room
        usable = room / (1 + _MARGIN / math.sqrt(middle))
        if always or all(_fits(one, middle, prompt_tokens, usable) for one in draws):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(lengths: Sequence[int], slots: int, prompt_tokens: int, room: float) -> bool:
    """Return whether one draw never needs more than `room` tokens: they only grow between ends, so at an end.

    A sample is admitted as `BatchScheduler` does it: beside a page for each that runs there is room for the root of the
    sum of squares of what they have.
    """
    running: list[tuple[int, int]] = []  # (end, begin less the prompt)
    now = begins = squares = 0
    for length in (*lengths, None):
        while running:
            count = len(running)
            used = count * now - begins
            spread = math.sqrt(max(count * now * now - 2 * now * begins + squares, 0))
            needed = used + prompt_tokens + count * PAGE_TOKENS + spread
            if length is not None and count < slots and needed <= room:
                break
            now, begin = heapq.heappop(running)
            if count * now - begins > room:
                return False
            begins, squares = begins - begin, squares - begin * begin
        if length is not None:
            heapq.heappush(running, (now + length, now - prompt_tokens))
            begins, squares = begins + now - prompt_tokens, squares + (now - prompt_tokens) ** 2
    return True
