"""`share_sequence`: the tokens of a sequence that each rank of a context-parallel group holds.

A rank holds a piece of the sequence's head and, mirrored, one of its tail. The mean position of its tokens is then the
middle of the sequence, so its causal attention is in proportion to its number of tokens. Source: A. Dubey et al., "The
Llama 3 Herd of Models" (2024), section 3.3.2, for equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.core.errors import PlanError


@dataclass(frozen=True)
class SequenceShare:
    """The tokens of one rank: `segments` (first, end) of positions, in order, neither empty nor adjacent."""

    segments: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return sum(end - first for first, end in self.segments)

    @property
    def positions(self) -> tuple[int, ...]:
        """Position of each token in the sequence, in order."""
        return tuple(at for first, end in self.segments for at in range(first, end))


def share_sequence(num_tokens: int, weights: Sequence[float], multiple: int = 1) -> tuple[SequenceShare, ...]:
    """Return the share of each rank of a sequence of `num_tokens` tokens, in proportion to `weights` (by rank).

    Each rank has at least `multiple` tokens and a multiple of it. Raises `PlanError` if that is impossible.
    """
    units = num_tokens // multiple
    if num_tokens % multiple or units < len(weights) or min(weights) <= 0:
        least = len(weights) * multiple
        raise PlanError(
            f"{num_tokens} tokens cannot be shared by {len(weights)} ranks of weights {list(weights)} in multiples of "
            f"{multiple}",
            hint=f"nearest valid: {max(units * multiple, least)} tokens, and weights above 0",
        )
    heads, tails = _split_evenly([one * multiple for one in _apportion(units, weights)])
    segments: list[list[tuple[int, int]]] = [[] for _ in weights]
    end = 0
    for rank, size in [*enumerate(heads), *reversed(list(enumerate(tails)))]:
        if size and segments[rank] and segments[rank][-1][1] == end:
            segments[rank][-1] = (segments[rank][-1][0], end + size)
        elif size:
            segments[rank].append((end, end + size))
        end += size
    return tuple(SequenceShare(tuple(one)) for one in segments)


def _apportion(units: int, weights: Sequence[float]) -> list[int]:
    """Return whole shares of `units`, one at least each: the floor, then the largest remainders."""
    spare, total = units - len(weights), sum(weights)
    exact = [spare * weight / total for weight in weights]
    shares = [int(one) for one in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (shares[rank] - exact[rank], rank))
    for rank in by_remainder[: spare - sum(shares)]:
        shares[rank] += 1
    return [1 + one for one in shares]


def _split_evenly(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the head and tail piece of each count; the sums of both lists differ by at most one."""
    heads: list[int] = []
    for count in counts:
        is_behind = 2 * sum(heads) <= sum(counts[: len(heads)])
        heads.append(count // 2 + (count % 2 if is_behind else 0))
    return heads, [count - head for count, head in zip(counts, heads, strict=True)]
