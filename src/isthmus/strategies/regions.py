"""The regions of each collective: which rank contributes which elements, and which rank receives them.

Blocks of several ranks follow each other in the address space, in rank order; blocks of all-to-all are spread, since
a rank knows the sizes of its own row and column only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from isthmus.strategies.step import Region

PAIR_STRIDE = 2**44
"""Distance of the addresses of two blocks of an all-to-all: more elements than a block has."""


def all_reduce(num_elements: int, size: int) -> list[Region]:
    """Every rank contributes and receives all elements."""
    everyone = tuple(range(size))
    return [Region(0, num_elements, everyone, everyone)] if num_elements else []


def reduce(num_elements: int, size: int, root: int) -> list[Region]:
    """Every rank contributes; `root` receives."""
    return [Region(0, num_elements, tuple(range(size)), (root,))] if num_elements else []


def broadcast(num_elements: int, size: int, root: int) -> list[Region]:
    """`root` contributes; every rank receives."""
    return [Region(0, num_elements, (root,), tuple(range(size)))] if num_elements else []


def all_gather(sizes: Sequence[int]) -> list[Region]:
    """Rank `r` contributes `sizes[r]` elements, which every rank receives."""
    everyone = tuple(range(len(sizes)))
    return [Region(start, stop, (rank,), everyone) for rank, start, stop in _blocks(sizes)]


def reduce_scatter(sizes: Sequence[int]) -> list[Region]:
    """Every rank contributes all elements; rank `r` receives the `sizes[r]` of its block."""
    everyone = tuple(range(len(sizes)))
    return [Region(start, stop, everyone, (rank,)) for rank, start, stop in _blocks(sizes)]


def gather(sizes: Sequence[int], root: int) -> list[Region]:
    """Rank `r` contributes `sizes[r]` elements, which `root` receives."""
    return [Region(start, stop, (rank,), (root,)) for rank, start, stop in _blocks(sizes)]


def scatter(sizes: Sequence[int], root: int) -> list[Region]:
    """`root` contributes all elements; rank `r` receives the `sizes[r]` of its block."""
    return [Region(start, stop, (root,), (rank,)) for rank, start, stop in _blocks(sizes)]


def all_to_all(rank: int, sent: Sequence[int], received: Sequence[int]) -> list[Region]:
    """Return the blocks of `rank`: it sends `sent[d]` elements to rank `d` and receives `received[s]` from `s`."""
    size = len(sent)
    row = [(pair_start(rank, to, size), num, (rank,), (to,)) for to, num in enumerate(sent) if num]
    column = [
        (pair_start(source, rank, size), num, (source,), (rank,))
        for source, num in enumerate(received)
        if num and source != rank
    ]
    return [Region(start, start + num, *ends) for start, num, *ends in sorted(row + column)]


def pair_start(sender: int, receiver: int, size: int) -> int:
    """Return the address of the block that `sender` sends to `receiver` in an all-to-all of `size` ranks."""
    return (sender * size + receiver) * PAIR_STRIDE


def _blocks(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return rank, start and stop of each block that has elements."""
    ends = pairwise(accumulate(sizes, initial=0))
    return [(rank, start, stop) for rank, (start, stop) in enumerate(ends) if stop > start]
