"""How many sequences a chip can serve at once, from the room that is left for their key/value cache.

Three answers to one question (`long-sequence-rl.txt`, 2.1): all sequences at their longest (safe, too few);
all at their mean; or by the distribution of lengths: while the longest still grow, the others have ended and
given back their cache, so what counts is that the number still running stays below the curve room / length at
every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SequenceLimits:
    """The largest number of sequences at once: by longest, by mean, and by the distribution of lengths.

    `tightest_length` is the length at which the distribution comes closest to the limit.
    """

    by_maximum: int
    by_mean: int
    by_distribution: int
    tightest_length: int


def cache_room_bytes(
    memory_bytes: float,
    *,
    weights_bytes: float,
    peak_activation_bytes: float,
    others_bytes: float,
    used: float,
) -> float:
    """Return the bytes left for the cache: the share `used` of the chip, less weights, profiled peak and
    others.
    """
    return max(0.0, used * memory_bytes - weights_bytes - peak_activation_bytes - others_bytes)


def sequence_limits(room_bytes: float, kv_bytes_per_token: float, lengths: Sequence[int]) -> SequenceLimits:
    """Return how many sequences fit into `room_bytes`; `lengths` (tokens, at least one) is a measured sample.

    All sequences start together and grow by a token a step. At length l the share s(l) of those at least as
    long is running, so N s(l) l tokens are cached; the answer is the largest N that fits at every l of the
    sample. Raises `InputError` for an empty sample or a length below 1.
    """
    if not lengths or min(lengths) < 1:
        raise InputError(
            "no lengths, or one below 1", hint="give the measured lengths of some sequences in tokens"
        )
    count = len(lengths)  # whole numbers are divided last, so that none is rounded down by a hair
    demand = ((length * (count - index), length) for index, length in enumerate(sorted(lengths)))
    tightest, at = max(demand)
    return SequenceLimits(
        by_maximum=int(room_bytes // (kv_bytes_per_token * max(lengths))),
        by_mean=int(room_bytes * count // (kv_bytes_per_token * sum(lengths))),
        by_distribution=int(room_bytes * count // (kv_bytes_per_token * tightest)),
        tightest_length=at,
    )
