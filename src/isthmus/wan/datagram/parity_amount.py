"""`ParityAmount`: how much parity a frame needs, from the share of packets that are lost."""

from __future__ import annotations

import functools
import math

from isthmus.wan.datagram.erasure_code import MAX_PARITY

FIRST_LOSS = 0.01
"""Share that counts as lost before any is measured."""

MISSED = 2e-4
"""Share of frames that may lose more than they have parity."""

_LEAST_LOSS = 0.001
_SAMPLE_PACKETS = 256
_WEIGHT = 1 / 16


class ParityAmount:
    """One sender's. The share is a moving average over some 4,000 packets."""

    def __init__(self) -> None:
        self._share, self._num_arrived, self._num_lost = FIRST_LOSS, 0, 0

    def note(self, *, arrived: int = 0, lost: int = 0) -> None:
        """Note packets that are acknowledged, and packets that count as lost."""
        self._num_arrived += arrived
        self._num_lost += lost
        total = self._num_arrived + self._num_lost
        if total >= _SAMPLE_PACKETS:
            self._share += (self._num_lost / total - self._share) * _WEIGHT
            self._num_arrived = self._num_lost = 0

    def for_pieces(self, num_pieces: int) -> int:
        """Return how many parity pieces a frame of `num_pieces` gets."""
        return _amount(num_pieces, math.ceil(max(self._share, _LEAST_LOSS) * 1000))


@functools.cache
def _amount(num_pieces: int, lost_of_1000: int) -> int:
    """Return the least amount with which, of independent losses, more than that many are rarer than `MISSED`."""
    for amount in range(1, MAX_PARITY):
        mean = (num_pieces + amount) * lost_of_1000 / 1000  # the losses follow Poisson's law
        terms = (math.exp(-mean) * mean**lost / math.factorial(lost) for lost in range(amount + 1))
        if 1 - sum(terms) < MISSED:
            return amount
    return MAX_PARITY
