"""`SentPackets`: packets on their way: which are acknowledged, which count as lost, and how long a round trip takes.

A packet is lost when one that left later has arrived and a quarter of a round trip has passed beyond its own
(RFC 8985, RACK), so that reordering is no loss. Where no answer comes at all, the oldest packets count as lost after a
time that doubles (RFC 9002, section 6.2).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from isthmus.wan.datagram.bottleneck_rate import Delivery
from isthmus.wan.datagram.outgoing_frames import FramePiece

MAX_ACK_DELAY_S = 0.01
"""Longest wait of an acknowledgement that a sender reckons with."""

_FIRST_RTT_S = 0.25
_LEAST_REORDER_S = 0.001
_MOST_PROBE_S = 2.0
_PROBE_PACKETS = 2


class SentPiece(NamedTuple):
    """A piece on its way under a number, with what was delivered when it left."""

    number: int
    piece: FramePiece
    num_bytes: int
    delivery: Delivery


class SentPackets:
    """One direction of a leg."""

    def __init__(self) -> None:
        self._sent = OrderedDict[int, SentPiece]()  # a dict searches over the places of those that have left it
        self.num_bytes = 0
        """Bytes on their way."""
        self.rtt_s = _FIRST_RTT_S
        """Smoothed round trip."""
        self._variation_s, self._latest_rtt_s = _FIRST_RTT_S / 2, _FIRST_RTT_S
        self._has_rtt = False
        self._newest_sent_s = -math.inf
        self._probe_from_s, self._num_probes = 0.0, 0

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, sent: SentPiece) -> None:
        """Note a packet that leaves now; numbers rise."""
        if not self._sent:
            self._probe_from_s = sent.delivery.sent_s
        self._sent[sent.number] = sent
        self.num_bytes += sent.num_bytes

    def acknowledge(self, ranges: Iterable[tuple[int, int]], delay_s: float, now_s: float) -> list[SentPiece]:
        """Return the packets that are newly acknowledged, in order of their numbers."""
        found = [
            sent
            for first, count in ranges
            for number in range(first, first + count)
            if (sent := self._sent.pop(number, None)) is not None
        ]
        if found:
            found.sort(key=lambda sent: sent.number)
            newest = found[-1].delivery.sent_s
            self._newest_sent_s = max(self._newest_sent_s, newest)
            self._measure(now_s - newest, delay_s)
            self.num_bytes -= sum(sent.num_bytes for sent in found)
            self._probe_from_s, self._num_probes = now_s, 0
        return found

    def lose(self, now_s: float) -> list[SentPiece]:
        """Take out what is lost by now, and return it."""
        found = []
        for sent in self._sent.values():
            if sent.delivery.sent_s > self._newest_sent_s or now_s < self._lost_s(sent):
                break
            found.append(sent)
        if not found and self._sent and now_s >= self._probe_s():
            found = [sent for _, sent in zip(range(_PROBE_PACKETS), self._sent.values(), strict=False)]
            self._probe_from_s, self._num_probes = now_s, self._num_probes + 1
        for sent in found:
            del self._sent[sent.number]
            self.num_bytes -= sent.num_bytes
        return found

    def due_s(self) -> float:
        """Return when `lose` may find something, infinite where nothing is on its way."""
        if not self._sent:
            return math.inf
        oldest = next(iter(self._sent.values()))
        lost_s = self._lost_s(oldest) if oldest.delivery.sent_s <= self._newest_sent_s else math.inf
        return min(lost_s, self._probe_s())

    def _lost_s(self, sent: SentPiece) -> float:
        reorder_s = max(self.rtt_s / 4, _LEAST_REORDER_S)
        return sent.delivery.sent_s + max(self.rtt_s, self._latest_rtt_s) + reorder_s

    def _probe_s(self) -> float:
        wait_s = self.rtt_s + max(4 * self._variation_s, _LEAST_REORDER_S) + MAX_ACK_DELAY_S
        return self._probe_from_s + min(wait_s * 2.0**self._num_probes, _MOST_PROBE_S)

    def _measure(self, rtt_s: float, delay_s: float) -> None:
        """Count a round trip, less the time that the far side says its acknowledgement waited."""
        rtt_s = max(rtt_s - min(delay_s, MAX_ACK_DELAY_S), 1e-6)
        self._latest_rtt_s = rtt_s
        if not self._has_rtt:
            self._has_rtt, self.rtt_s, self._variation_s = True, rtt_s, rtt_s / 2
            return
        self._variation_s += (abs(self.rtt_s - rtt_s) - self._variation_s) / 4
        self.rtt_s += (rtt_s - self.rtt_s) / 8

    @property
    def latest_rtt_s(self) -> float:
        """The last round trip that was measured."""
        return self._latest_rtt_s
