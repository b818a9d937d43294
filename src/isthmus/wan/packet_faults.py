"""`PacketFaults`: which packets a link loses, repeats or delays beyond later ones, by seed.

Losses come alone, or in bursts by the model of E. N. Gilbert (Bell System Technical Journal 39, 1960): in the bad state
every packet is lost, and the states last so that the share of lost packets and the mean length of bursts are as stated.
"""

from __future__ import annotations

from random import Random

from isthmus.core.pool import Link


class PacketFaults:
    """The faults of one direction of `link`. Without faults it draws no random number."""

    def __init__(self, link: Link, rng: Random) -> None:
        self._link, self._rng = link, rng
        self._is_bad = False
        self._leaves_bad = 1 / link.loss_burst_packets
        self._enters_bad = link.loss * self._leaves_bad / (1 - link.loss)

    def loses(self) -> bool:
        """Return whether the next packet is lost."""
        if not self._link.loss:
            return False
        if self._link.loss_burst_packets == 1:
            return self._rng.random() < self._link.loss
        chance = self._leaves_bad if self._is_bad else self._enters_bad
        if self._rng.random() < chance:
            self._is_bad = not self._is_bad
        return self._is_bad

    def repeats(self) -> bool:
        """Return whether a packet that is not lost arrives twice."""
        return bool(self._link.duplication) and self._rng.random() < self._link.duplication

    def delay_s(self) -> float:
        """Return by how much a packet is late, without holding up those behind it."""
        if not self._link.reordering or self._rng.random() >= self._link.reordering:
            return 0.0
        return self._link.reordering_ms / 1e3
