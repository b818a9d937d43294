"""`group_sequences`: give every sequence of a micro-batch its own number of ranks (hybrid data parallelism).

Long sequences are cut over several ranks, short ones share a rank or have one each. Source: long-sequence RL
report, section 3.2. See `docs/algorithms/sequence-groups.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """Ranks (from 0) that work together on `sequences` (indices), each sequence cut over all of them."""

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]


def group_sequences(lengths: Sequence[int], num_ranks: int) -> tuple[SequenceGroup, ...]:
    """Return groups of consecutive ranks that together hold every sequence once and every rank at most once.

    `lengths[i]` is the tokens of sequence `i` (at least 1). The largest number of tokens per rank is the
    least for which first-fit decreasing finds room, searched by bisection; a sequence then gets as few ranks
    as that allows, so that it talks least, and ranks stay idle where cutting further would not help.
    """
    if num_ranks < 1 or not lengths or min(lengths) < 1:
        raise InputError(
            f"sequences of {list(lengths)} tokens on {num_ranks} ranks", hint="at least 1 of each"
        )
    limit = _least_limit(lengths, num_ranks)
    packed = _pack(lengths, limit)
    groups, rank = [], 0
    for width, sequences in packed:
        groups.append(SequenceGroup(ranks=tuple(range(rank, rank + width)), sequences=sequences))
        rank += width
    return tuple(groups)


def _least_limit(lengths: Sequence[int], num_ranks: int) -> int:
    """Return the least number of tokens per rank that bisection finds to have room for everything."""
    low, high = max(1, -(-sum(lengths) // num_ranks)), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if sum(width for width, _ in _pack(lengths, middle)) <= num_ranks:
            high = middle
        else:
            low = middle + 1
    return low


def _pack(lengths: Sequence[int], limit: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (ranks, sequences) of each group if no rank may hold more than `limit` tokens.

    Longest first: a sequence above the limit gets ranks of its own, the others the first rank with room.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[tuple[int, tuple[int, ...]]] = []
    room: list[int] = []
    for i in order:
        width = -(-lengths[i] // limit)
        fit = next((g for g, free in enumerate(room) if width == 1 and free >= lengths[i]), None)
        if fit is None:
            groups.append((width, (i,)))
            room.append(limit - lengths[i] if width == 1 else 0)
        else:
            groups[fit] = (1, (*groups[fit][1], i))
            room[fit] -= lengths[i]
    return groups
