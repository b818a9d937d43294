"""`group_sequences`: assigns a number of ranks to each sequence of a micro-batch (hybrid data parallelism).

Long sequences are split over several ranks; short ones share a rank or have one each. Source: long-sequence
RL report, section 3.2. See `docs/algorithms/sequence-groups.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """Ranks (from 0) that process `sequences` (indices) together, each sequence split over all of them."""

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]


def group_sequences(lengths: Sequence[int], num_ranks: int) -> tuple[SequenceGroup, ...]:
    """Return groups of consecutive ranks with every sequence in one group and every rank in at most one.

    `lengths[i]` is the number of tokens of sequence `i` (at least 1), (num_sequences,). Bisection finds the
    smallest limit of tokens per rank for which first-fit decreasing fits all sequences. Each sequence then
    gets the fewest ranks that the limit allows, to minimise communication; ranks that would not help stay
    idle.
    """
    if num_ranks < 1 or not lengths or min(lengths) < 1:
        raise InputError(f"sequences of {list(lengths)} tokens on {num_ranks} ranks", hint="give at least 1 of each")
    limit = _min_tokens_per_rank(lengths, num_ranks)
    packed = _pack_groups(lengths, limit)
    groups, rank = [], 0
    for width, sequences in packed:
        groups.append(SequenceGroup(ranks=tuple(range(rank, rank + width)), sequences=sequences))
        rank += width
    return tuple(groups)


def _min_tokens_per_rank(lengths: Sequence[int], num_ranks: int) -> int:
    """Return the smallest limit of tokens per rank, found by bisection, for which all sequences fit."""
    low, high = max(1, -(-sum(lengths) // num_ranks)), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if sum(width for width, _ in _pack_groups(lengths, middle)) <= num_ranks:
            high = middle
        else:
            low = middle + 1
    return low


def _pack_groups(lengths: Sequence[int], limit: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (number of ranks, sequences) of each group if a rank holds at most `limit` tokens.

    Longest first: a sequence above the limit gets its own ranks, any other the first rank where it fits.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[tuple[int, tuple[int, ...]]] = []
    free_tokens: list[int] = []
    for i in order:
        width = -(-lengths[i] // limit)
        fit = next((g for g, free in enumerate(free_tokens) if width == 1 and free >= lengths[i]), None)
        if fit is None:
            groups.append((width, (i,)))
            free_tokens.append(limit - lengths[i] if width == 1 else 0)
        else:
            groups[fit] = (1, (*groups[fit][1], i))
            free_tokens[fit] -= lengths[i]
    return groups
