"""`ClassRanks`: the rank of an element among those of its class, and the element of a rank.

A class is given by a row of booleans, kept as bits in words of 64 with the number of members up to each word: a class
costs a fraction of a nanosecond an element, and no array of places. Where many are asked for, an array is faster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isthmus.weights.bit_fields import Integers

BLOCK = 64
"""Elements of a word."""

Words = NDArray[np.uint64]

_DENSE = 8
"""An array of places is made where more than the members over this number are asked for."""

_ONE = np.uint64(1)
_HAS_COUNT = hasattr(np, "bitwise_count")  # numpy 2


class ClassRanks:
    """Counts of one class. `members` [n] are booleans, n a multiple of `BLOCK`, not to be changed meanwhile."""

    def __init__(self, members: NDArray[np.bool_]) -> None:
        self._members = members
        self._words: Words = np.packbits(members, bitorder="little").view("<u8")
        self._ends: Integers = np.cumsum(count_bits(self._words), dtype=np.int64)
        self.size = int(self._ends[-1]) if len(self._ends) else 0
        """The number of members."""

    def ranks_of(self, places: Integers) -> Integers:
        """Return how many members stand before each of `places` [m], which are members and rise, as [m]."""
        if len(places) == self.size:
            return np.arange(self.size)
        blocks = places // BLOCK
        words = self._words[blocks]
        outside = words >> (places % BLOCK).astype(np.uint64)
        ranks: Integers = self._ends[blocks] - count_bits(outside)
        return ranks

    def places_of(self, ranks: Integers) -> Integers:
        """Return the places of the members number `ranks` [m], each below `size`, as [m]."""
        if len(ranks) * _DENSE > self.size:
            return np.flatnonzero(self._members)[ranks]
        blocks = np.searchsorted(self._ends, ranks, side="right")
        words = self._words[blocks]
        left = ranks - (self._ends[blocks] - count_bits(words))
        places = blocks * BLOCK
        for width in (32, 16, 8, 4, 2, 1):  # in which half of the bits the member is
            low = words & np.uint64((1 << width) - 1)
            num_low = count_bits(low).astype(np.int64)
            above = left >= num_low
            left -= np.where(above, num_low, 0)
            places += above * width
            words = np.where(above, words >> np.uint64(width), low)
        return places


def count_bits(words: Words, built_in: bool = _HAS_COUNT) -> NDArray[np.uint8]:
    """Return the number of ones of each word [n], as [n]; by sums of neighbouring bits where numpy has no function."""
    if built_in:
        return np.bitwise_count(words)
    pairs = words - ((words >> _ONE) & np.uint64(0x5555_5555_5555_5555))
    threes = np.uint64(0x3333_3333_3333_3333)
    fours = (pairs & threes) + ((pairs >> np.uint64(2)) & threes)
    eights = (fours + (fours >> np.uint64(4))) & np.uint64(0x0F0F_0F0F_0F0F_0F0F)
    counted: NDArray[np.uint8] = ((eights * np.uint64(0x0101_0101_0101_0101)) >> np.uint64(56)).astype(np.uint8)
    return counted
