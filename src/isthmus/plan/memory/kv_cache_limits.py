"""The number of concurrent sequences that a chip can serve, from the memory available for their KV cache.

Three estimates (`long-sequence-rl.txt`, 2.1): all sequences at maximum length (safe, too low); all at mean
length; or by the distribution of lengths. By the last, shorter sequences have ended and freed their cache
while the longest still grow, so the number still running must stay below cache / length at every length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import InputError

USABLE_SHARE = 0.9
"""Share of a chip's memory that a serving framework uses by default."""


@dataclass(frozen=True, kw_only=True)
class SequenceLimits:
    """The largest number of concurrent sequences, by three estimates."""

    by_maximum: int
    """All sequences at the maximum length."""
    by_mean: int
    """All sequences at the mean length."""
    by_distribution: int
    """By the distribution of lengths."""
    tightest_length: int
    """The length in tokens at which the distribution is closest to the limit."""


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parse `1024,8192`; raise `InputError` for anything but whole numbers of at least 1, separated by commas."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word)):
            raise InputError(f"sequence length '{word[:20]}'", hint="write measured lengths in tokens: 1024,2048,8192")
    return tuple(map(int, words))


def serving_limits(table: Mapping[str, Any], memory_bytes: float, lengths: Sequence[int]) -> dict[str, float]:
    """Return how many sequences a chip of `memory_bytes` serves concurrently, by three estimates.

    `table` is the result of `memory_table` for inference: weights, one layer's activations of a sequence (an
    upper bound of the working memory, since no layer is kept for a backward pass), and cache bytes per token.
    """
    activations = table["per_layer_activations"]
    cache_bytes = available_cache_bytes(
        memory_bytes,
        weights_bytes=table["per_chip"]["static"],
        peak_activation_bytes=activations["attention"]["total"] + activations["moe"]["balanced"],
        other_bytes=0.0,
        usable_share=USABLE_SHARE,
    )
    return {"cache_bytes": cache_bytes, **vars(sequence_limits(cache_bytes, table["kv_bytes_per_token"], lengths))}


def available_cache_bytes(
    memory_bytes: float,
    *,
    weights_bytes: float,
    peak_activation_bytes: float,
    other_bytes: float,
    usable_share: float,
) -> float:
    """Return the bytes available for the cache: the share `usable_share` of the memory, less the other arguments."""
    return max(0.0, usable_share * memory_bytes - weights_bytes - peak_activation_bytes - other_bytes)


def sequence_limits(cache_bytes: float, kv_bytes_per_token: float, lengths: Sequence[int]) -> SequenceLimits:
    """Return how many sequences fit into `cache_bytes`; `lengths` is a measured sample, in tokens.

    All sequences start together and grow by one token per step. At length l the share s(l) of at least that
    length is still running, so N s(l) l tokens are cached; the result by distribution is the largest N that
    fits at every l of the sample. Raises `InputError` for an empty sample or a length below 1.
    """
    if not lengths or min(lengths) < 1:
        raise InputError("no lengths, or a length below 1", hint="give measured sequence lengths in tokens")
    count = len(lengths)  # integers are divided last, to avoid rounding errors
    demand = ((length * (count - index), length) for index, length in enumerate(sorted(lengths)))
    tightest, length_at_limit = max(demand)
    return SequenceLimits(
        by_maximum=int(cache_bytes // (kv_bytes_per_token * max(lengths))),
        by_mean=int(cache_bytes * count // (kv_bytes_per_token * sum(lengths))),
        by_distribution=int(cache_bytes * count // (kv_bytes_per_token * tightest)),
        tightest_length=length_at_limit,
    )
