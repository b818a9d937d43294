"""`ChunkTable`: how weights are cut into pieces, which have digests, and into chunks, which cross links.

A piece is up to `PIECE_ELEMENTS` elements of one tensor. Whole weights cross piece by piece: a small chunk is soon on
its way to the next site. Changes take a hundredth of the bytes and are coded better in longer rows: a chunk of theirs
is up to `CHANGED_PIECES` pieces of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from isthmus.rl.relay.relay_events import Coding

PIECE_ELEMENTS = 1 << 18
"""Most elements of a piece: at 0.2 Gbit/s, half a megabyte of 16-bit floats takes 21 ms."""
CHANGED_PIECES = 4
DIGEST_BYTES = 32


class Chunk(NamedTuple):
    """`num_elements` elements of a tensor from `start`, which are the pieces `first` to `first + num_pieces`."""

    name: str
    start: int
    num_elements: int
    first: int
    num_pieces: int


class ChunkTable:
    """The pieces and chunks of tensors with `counts` elements, in the order of their names."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = dict(sorted(counts.items()))
        self.pieces = tuple(_cut(self.counts, PIECE_ELEMENTS))
        self._changed = tuple(_cut(self.counts, PIECE_ELEMENTS * CHANGED_PIECES))

    def chunks(self, coding: Coding) -> Sequence[Chunk]:
        """Return the chunks of a coding, by number."""
        return self.pieces if coding.base is None else self._changed

    def num_chunks(self, coding: Coding) -> int:
        """Return how many chunks a coding has."""
        return len(self.chunks(coding))


def _cut(counts: Mapping[str, int], size: int) -> Iterator[Chunk]:
    """Yield chunks of up to `size` elements, a multiple of a piece; a tensor without elements has one."""
    first = 0
    for name, total in counts.items():
        for start in range(0, max(total, 1), size):
            count = min(size, total - start)
            num_pieces = max(-(-count // PIECE_ELEMENTS), 1)
            yield Chunk(name, start, count, first, num_pieces)
            first += num_pieces
