"""`ClassRanks`: the place of an element among the elements of its class, and back.

A class is given by a row of booleans. Members are counted in blocks of 64 by adding 8 booleans at a time as bytes of a
64-bit word, so that a class costs a fraction of a nanosecond an element and no array of places.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.weights.bit_fields import Integers

BLOCK = 64
"""Elements that are counted at once."""

_BYTE_SUM = np.uint64(0x0101_0101_0101_0101)
_BELOW = np.tril(np.ones((BLOCK, BLOCK), np.uint8), -1).view(np.uint64)
"""[64, 8] words: row i marks the first i of 64 booleans."""


class ClassRanks:
    """Counts of one class. `members` [n] are booleans, n a multiple of `BLOCK`."""

    def __init__(self, members: NDArray[np.bool_]) -> None:
        self._rows = members.view(np.uint8).reshape(-1, BLOCK)
        words = members.view(np.uint64)
        sums = words[0::8].copy()
        for place in range(1, 8):
            sums += words[place::8]
        self._ends: Integers = np.cumsum(_sum_of_bytes(sums))
        self.size = int(self._ends[-1]) if len(self._ends) else 0
        """The number of members."""

    def ranks_of(self, places: Integers) -> Integers:
        """Return how many members stand before each of `places` [m], as [m]."""
        blocks = places // BLOCK
        inside = self._rows[blocks].view(np.uint64) & _BELOW[places % BLOCK]
        before = np.where(blocks > 0, self._ends[blocks - 1], 0)
        ranks: Integers = before + _sum_of_bytes(inside.sum(axis=1))
        return ranks

    def places_of(self, ranks: Integers) -> Integers:
        """Return the places of the members number `ranks` [m], each below `size`, as [m]."""
        blocks = np.searchsorted(self._ends, ranks, side="right")
        before = np.where(blocks > 0, self._ends[blocks - 1], 0)
        counted = np.cumsum(self._rows[blocks], axis=1, dtype=np.uint8)
        inside = (counted <= (ranks - before)[:, None]).sum(axis=1)
        places: Integers = blocks * BLOCK + inside
        return places


def _sum_of_bytes(words: NDArray[np.uint64]) -> Integers:
    """Return the sum of the 8 bytes of each word, at most 255."""
    return ((words * _BYTE_SUM) >> np.uint64(56)).astype(np.int64)
