"""`DcqcnRate`: the reaction point of DCQCN, which sets the rate of a flow by congestion notification packets.

Source: Y. Zhu et al., "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015, 3.1 and figure 7; its
constants, with rates in proportion to the port's.
"""

from __future__ import annotations

ALPHA_GAIN = 1 / 256
ALPHA_INTERVAL_S = 55e-6
INCREASE_INTERVAL_S = 1.5e-3
INCREASE_BYTES = 10 * 2**20
FAST_STAGES = 5
ADDITIVE_SHARE = 1 / 1000
HYPER_SHARE = 1 / 100
MIN_SHARE = 1 / 1000


class DcqcnRate:
    """The rate of one flow out of a port of `port_bytes_per_s`; it begins at the port's."""

    def __init__(self, port_bytes_per_s: float) -> None:
        self.port_bytes_per_s = self._current = self._target = port_bytes_per_s
        self._alpha = 1.0
        self._alpha_s = self._increase_s = 0.0
        self._num_timers = self._num_byte_rounds = 0
        self._num_bytes = 0

    @property
    def is_limited(self) -> bool:
        """Whether the rate is below the port's."""
        return self._current < self.port_bytes_per_s

    def notify(self, now_s: float) -> None:
        """Slow down: a congestion notification packet has come."""
        if self.is_limited:
            self._catch_up(now_s)
        else:  # a limiter starts with the first notification
            self._alpha = 1.0
        self._target = self._current
        self._current = max(self.port_bytes_per_s * MIN_SHARE, self._current * (1 - self._alpha / 2))
        self._alpha = (1 - ALPHA_GAIN) * self._alpha + ALPHA_GAIN
        self._alpha_s = self._increase_s = now_s
        self._num_timers = self._num_byte_rounds = self._num_bytes = 0

    def sent(self, num_bytes: int) -> None:
        """Count bytes, which raise the rate as time does."""
        if self.is_limited:
            self._num_bytes += num_bytes
            if self._num_bytes >= INCREASE_BYTES:
                self._num_bytes -= INCREASE_BYTES
                self._num_byte_rounds += 1
                self._increase()

    def bytes_per_s(self, now_s: float) -> float:
        """Return the rate at `now_s`."""
        if self.is_limited:
            self._catch_up(now_s)
        return self._current

    def _catch_up(self, now_s: float) -> None:
        rounds = int((now_s - self._alpha_s) / ALPHA_INTERVAL_S)
        if rounds > 0:
            self._alpha *= (1 - ALPHA_GAIN) ** rounds
            self._alpha_s += rounds * ALPHA_INTERVAL_S
        while self.is_limited and now_s - self._increase_s >= INCREASE_INTERVAL_S:
            self._increase_s += INCREASE_INTERVAL_S
            self._num_timers += 1
            self._increase()

    def _increase(self) -> None:
        port = self.port_bytes_per_s
        if min(self._num_timers, self._num_byte_rounds) > FAST_STAGES:
            self._target += port * HYPER_SHARE
        elif max(self._num_timers, self._num_byte_rounds) > FAST_STAGES:
            self._target += port * ADDITIVE_SHARE
        self._target = min(self._target, port)
        self._current = (self._target + self._current) / 2
        if self._current > port * 0.9999:
            self._current = port
