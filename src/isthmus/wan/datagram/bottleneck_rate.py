"""`BottleneckRate`: how fast a sender may send, from what arrives and how long it takes; loss alone changes nothing.

The rate follows the highest delivery rate of the last round trips and the shortest round trip, as in BBR (N. Cardwell
et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14(5), 2016; delivery rates as in
draft-cheng-iccrg-delivery-rate-estimation). Beyond it: the share of packets that the line itself loses is added to the
rate, so that the line stays full whatever it loses. That share is measured on packets that leave below the line's rate,
which no full queue can lose.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from isthmus.wan.datagram.datagram_packet import MAX_CONTENT_BYTES

_STARTUP_GAIN = 2.885
_PROBE_GAINS = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
_DRAIN_GAIN = 0.9
"""While the shortest round trip of a round shows a queue."""
_WINDOW_GAIN = 2.0
_FULL_GROWTH, _FULL_ROUNDS = 1.25, 3
_ROUNDS_KEPT = 10
_MIN_RTT_S = 10.0
_DRAINED_S = 0.2
_FIRST_WINDOW_PACKETS, _LEAST_WINDOW_PACKETS = 32, 8
_FIRST_RTT_S = 0.1
_QUEUE_FREE, _ROOM = 1.25, 1.1
_MOST_LOSS = 0.2
_LOSS_SAMPLE_PACKETS = 200
_BURST_BYTES = 64 * 2**10


class Delivery(NamedTuple):
    """What was delivered when a packet left: carried with the packet until it is acknowledged."""

    sent_s: float
    delivered_bytes: int
    delivered_s: float
    first_sent_s: float
    is_app_limited: bool
    is_below_rate: bool
    """Whether it left at less than the line's rate, so that no queue of ours can have lost it."""


class BottleneckRate:
    """One sender's. Times are of any steady clock."""

    def __init__(self, now_s: float) -> None:
        self.min_rtt_s = math.inf
        self._min_rtt_at_s, self._least_rtt_s = now_s, math.inf
        self._delivered_bytes, self._delivered_s, self._first_sent_s = 0, now_s, now_s
        self._rates: deque[tuple[int, float]] = deque()
        self._round, self._round_ends_bytes = 0, 0
        self._phase, self._full_rate, self._full_rounds = "startup", 0.0, 0
        self._probe, self._probe_since_s, self._drain_until_s = 0, now_s, -math.inf
        self._last_sent_s, self._had_more, self._paused_s = now_s, False, now_s
        self._round_rtt_s, self._has_queue = math.inf, False
        self._probe_from = math.inf
        self._loss_share, self._sampled_bytes, self._lost_bytes = 0.0, 0, 0

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Highest delivery rate of the last rounds; 0 before the first."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Rate at which packets leave."""
        bandwidth = self.bandwidth_bytes_per_s
        if not bandwidth:
            return _STARTUP_GAIN * _FIRST_WINDOW_PACKETS * MAX_CONTENT_BYTES / _FIRST_RTT_S
        return self._gain() * bandwidth * self._loss_gain()

    @property
    def window_bytes(self) -> float:
        """Most bytes that may be on their way."""
        least = _LEAST_WINDOW_PACKETS * MAX_CONTENT_BYTES
        bandwidth = self.bandwidth_bytes_per_s
        if not bandwidth or math.isinf(self.min_rtt_s):
            return _FIRST_WINDOW_PACKETS * MAX_CONTENT_BYTES
        product = bandwidth * self.min_rtt_s * self._loss_gain()
        if self._phase == "rtt":
            return max(least, product / 2)
        return max(least, _WINDOW_GAIN * product + _BURST_BYTES)

    def sent(self, now_s: float, in_flight_bytes: int, *, has_more: bool) -> Delivery:
        """Note a packet that leaves; `has_more` says whether others wait, so that the line limits, not the sender."""
        if in_flight_bytes == 0:
            self._first_sent_s = self._delivered_s = now_s
        if not self._had_more and now_s > self._last_sent_s:
            self._paused_s = now_s
        self._last_sent_s, self._had_more = now_s, has_more
        return Delivery(
            now_s,
            self._delivered_bytes,
            self._delivered_s,
            self._first_sent_s,
            self._first_sent_s <= self._paused_s,  # until an answer to what left after the pause
            self._gain() < 1 and not self._has_queue,
        )

    def arrived(self, num_bytes: int, delivery: Delivery) -> None:
        """Note a packet that is acknowledged; `acknowledged` follows with the newest of them."""
        self._delivered_bytes += num_bytes
        if delivery.is_below_rate:
            self._sampled_bytes += num_bytes

    def acknowledged(self, newest: Delivery, rtt_s: float, now_s: float, in_flight_bytes: int) -> None:
        """Note the packet that left last of those that have arrived, and took `rtt_s`."""
        self._delivered_s, self._first_sent_s = now_s, newest.sent_s
        if newest.delivered_bytes >= self._round_ends_bytes:
            self._round, self._round_ends_bytes = self._round + 1, self._delivered_bytes
            self._has_queue = _QUEUE_FREE * self.min_rtt_s < self._round_rtt_s < math.inf
            self._round_rtt_s = math.inf
            self._end_round(newest.is_app_limited)
        self._round_rtt_s = min(self._round_rtt_s, rtt_s)
        self._least_rtt_s = min(self._least_rtt_s, rtt_s)
        if rtt_s <= self.min_rtt_s:
            self.min_rtt_s, self._min_rtt_at_s = rtt_s, now_s
        self._sample(newest, now_s)
        self._move(now_s, in_flight_bytes)

    def lost(self, num_bytes: int, delivery: Delivery) -> None:
        """Note a packet that is to be sent again."""
        if delivery.is_below_rate:
            self._lost_bytes += num_bytes

    def _sample(self, newest: Delivery, now_s: float) -> None:
        interval_s = max(now_s - newest.delivered_s, newest.sent_s - newest.first_sent_s)
        if interval_s <= 0 or interval_s < self.min_rtt_s:
            return
        rate = (self._delivered_bytes - newest.delivered_bytes) / interval_s
        if newest.is_app_limited and rate < self.bandwidth_bytes_per_s:
            return
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((self._round, rate))
        while len(self._rates) > 1 and self._rates[0][0] <= self._round - _ROUNDS_KEPT:
            self._rates.popleft()

    def _end_round(self, is_app_limited: bool) -> None:
        total = self._sampled_bytes + self._lost_bytes
        if total >= _LOSS_SAMPLE_PACKETS * MAX_CONTENT_BYTES:
            self._loss_share += (self._lost_bytes / total - self._loss_share) / 4
            self._sampled_bytes = self._lost_bytes = 0
        if self._phase != "startup" or is_app_limited:
            return
        if self.bandwidth_bytes_per_s >= self._full_rate * _FULL_GROWTH:
            self._full_rate, self._full_rounds = self.bandwidth_bytes_per_s, 0
            return
        self._full_rounds += 1
        if self._full_rounds >= _FULL_ROUNDS or self._has_queue:
            self._phase = "drain"

    def _move(self, now_s: float, in_flight_bytes: int) -> None:
        product = self.bandwidth_bytes_per_s * self.min_rtt_s
        if self._phase == "drain" and in_flight_bytes <= product:
            self._phase, self._probe, self._probe_since_s = "probe", 2, now_s
        elif self._phase == "rtt" and now_s >= self._drain_until_s:
            self._phase, self._probe, self._probe_since_s = "probe", 2, now_s
            if self._least_rtt_s < math.inf:
                self.min_rtt_s, self._min_rtt_at_s = self._least_rtt_s, now_s
        elif self._phase == "probe":
            has_drained = self._probe == 1 and in_flight_bytes <= product
            if has_drained or now_s - self._probe_since_s >= self.min_rtt_s:
                self._next_gain(now_s)
            if now_s - self._min_rtt_at_s > _MIN_RTT_S:
                self._phase, self._least_rtt_s = "rtt", math.inf
                self._drain_until_s = now_s + self.min_rtt_s + _DRAINED_S

    def _next_gain(self, now_s: float) -> None:
        """Go on in the cycle; try a higher rate again at once where the last try found room and no queue."""
        has_room = not self._has_queue and self.bandwidth_bytes_per_s >= _ROOM * self._probe_from
        self._probe = 0 if self._probe == 2 and has_room else (self._probe + 1) % len(_PROBE_GAINS)
        self._probe_since_s = now_s
        if self._probe == 0:
            self._probe_from = self.bandwidth_bytes_per_s

    def _gain(self) -> float:
        if self._phase == "startup":
            return _STARTUP_GAIN
        if self._phase == "drain":
            return 1 / _STARTUP_GAIN
        if self._phase != "probe":
            return 1.0
        return min(_PROBE_GAINS[self._probe], _DRAIN_GAIN) if self._has_queue else _PROBE_GAINS[self._probe]

    def _loss_gain(self) -> float:
        return 1 / (1 - min(self._loss_share, _MOST_LOSS))
