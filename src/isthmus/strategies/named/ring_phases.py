"""The two halves of a ring all-reduce, for one ring or several at a time.

Source: A. Gibiansky, "Bringing HPC techniques to deep learning", 2017; figure 8 of the PASSING paper.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.strategies.step import Step
from isthmus.strategies.worker_grid import Range, chunks


def reduce_scatter(ring: Sequence[int], elements: Range) -> list[Step]:
    """Return the steps after which place `j` of `ring` holds the sum of chunk `(j + 1) % n` of n chunks.

    In round `i` of n - 1, place `j` sends chunk `(j - i) % n` to the next place, which adds its own.
    """
    num, parts = len(ring), chunks(elements, len(ring))
    return [
        Step(i, ring[j], ring[(j + 1) % num], *parts[(j - i) % num], adds=True)
        for i in range(num - 1)
        for j in range(num)
    ]


def all_gather(ring: Sequence[int], elements: Range, first_round: int = 0) -> list[Step]:
    """Return the steps that take the chunks from where `reduce_scatter` leaves them to every place of `ring`."""
    num, parts = len(ring), chunks(elements, len(ring))
    return [
        Step(first_round + i, ring[j], ring[(j + 1) % num], *parts[(j + 1 - i) % num], adds=False)
        for i in range(num - 1)
        for j in range(num)
    ]


def all_reduce(ring: Sequence[int], elements: Range) -> list[Step]:
    """Return the steps of both halves: 2 (n - 1) rounds, in each of which every place sends one chunk."""
    return [*reduce_scatter(ring, elements), *all_gather(ring, elements, first_round=len(ring) - 1)]


def held_chunk(place: int, elements: Range, num: int) -> Range:
    """Return the chunk that `place` holds after `reduce_scatter` over `num` places."""
    return chunks(elements, num)[(place + 1) % num]
