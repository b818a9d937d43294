"""Model of one link direction as pure arithmetic: send times in, delivery times out.

`WirePath` is the wire: a queue, a rate, then delay and jitter. `Shaper` is the view of byte streams: it adds
header bytes and models packet loss as the delay and the rate reduction it causes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

from isthmus.core.link_throughput import effective_bytes_per_s, segment_bytes, wire_bytes
from isthmus.core.pool import Link, Pool

CHUNK_S = 1e-3
"""Duration of one chunk at the link's rate: the granularity of sharing and of the emulator's work."""

MAX_CHUNK_BYTES = 256 * 1024
"""Upper bound on a chunk."""

MIN_QUEUE_S = 8e-3
"""Minimum queue length; the queue holds one round trip at the link's rate, or this if longer."""

JITTER_CORRELATION_S = 10e-3
"""Correlation time (e-folding) of jitter. In an order-preserving queue, independent draws for packets
microseconds apart would add their maximum to the delay of all."""


class WirePath:
    """The wire of one direction: rate in wire bytes per second, one-way delay and jitter in seconds.

    The one-way delay is an Ornstein-Uhlenbeck process: normal with standard deviation `jitter_s`,
    truncated at 0, with correlation time `JITTER_CORRELATION_S`. Order is preserved.
    """

    def __init__(self, bytes_per_s: float, delay_s: float, jitter_s: float, rng: Random) -> None:
        self.bytes_per_s, self.delay_s, self.jitter_s = bytes_per_s, delay_s, jitter_s
        self._rng = rng
        self._idle_from_s = -math.inf
        self._last_arrival_s = -math.inf
        self._deviation = 0.0
        self._drawn_at_s = -math.inf

    def backlog_s(self, now_s: float) -> float:
        """Return how long the queued bytes keep the wire busy, in seconds."""
        return max(0.0, self._idle_from_s - now_s)

    def admit(self, now_s: float, num_wire_bytes: float) -> float:
        """Queue wire bytes; return the arrival time of the last one. `now_s` must not decrease."""
        self._idle_from_s = max(now_s, self._idle_from_s) + num_wire_bytes / self.bytes_per_s
        self._last_arrival_s = max(self._last_arrival_s, self._idle_from_s + self._draw_delay_s())
        return self._last_arrival_s

    def yield_to(self, now_s: float, num_wire_bytes: float) -> None:
        """Delay this queue by the time that wire bytes of higher priority take."""
        self._idle_from_s = max(now_s, self._idle_from_s) + num_wire_bytes / self.bytes_per_s

    def _draw_delay_s(self) -> float:
        if self.jitter_s == 0:
            return self.delay_s
        keep = math.exp(min(self._drawn_at_s - self._idle_from_s, 0.0) / JITTER_CORRELATION_S)
        fresh = math.sqrt(1 - keep * keep) * self._rng.gauss(0, 1)
        self._deviation, self._drawn_at_s = keep * self._deviation + fresh, self._idle_from_s
        return max(0.0, self.delay_s + self._deviation * self.jitter_s)


@dataclass
class RateLimit:
    """A rate in wire bytes per second that some flows share, and when it allows the next send."""

    bytes_per_s: float
    next_send_s: float = -math.inf


@dataclass
class Flow:
    """One stream: when its congestion control allows the next send, its last arrival, and its booked rate, if any."""

    next_send_s: float = -math.inf
    last_arrival_s: float = -math.inf
    limit: RateLimit | None = None


@dataclass
class Shaper:
    """One direction of `link`, shared by all its streams. Sizes are payload bytes.

    Deterministic: equal seeds, times and sizes give equal deliveries.
    """

    link: Link
    rng: Random
    reverse: Link | None = None
    """The opposite direction; None if it equals `link`."""
    low_priority: Shaper | None = None
    """A shaper of the same wire with lower priority, which loses the time that this one sends."""
    path: WirePath = field(init=False)

    def __post_init__(self) -> None:
        link = self.link
        self.path = WirePath(link.bandwidth_bytes_per_s, link.delay_s, link.jitter_ms / 1e3, self.rng)
        self.round_trip_s = link.delay_s + (self.reverse or link).delay_s
        self.flow_bytes_per_s = effective_bytes_per_s(link, self.reverse)
        self.queue_s = max(self.round_trip_s, MIN_QUEUE_S)
        self.segment_bytes = segment_bytes(link)

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes to read from a stream at a time: `CHUNK_S` at its rate, in whole segments."""
        wanted = min(self.flow_bytes_per_s * CHUNK_S, MAX_CHUNK_BYTES)
        return max(round(wanted / self.segment_bytes), 1) * self.segment_bytes

    @property
    def window_bytes(self) -> int:
        """Most bytes of one stream in flight: its rate times delay, queue and two retransmissions."""
        in_flight_s = self.link.delay_s + self.queue_s + 2 * self.round_trip_s + 8 * self.path.jitter_s
        return round(self.flow_bytes_per_s * in_flight_s) + 4 * self.chunk_bytes

    def queue_wait_s(self, now_s: float) -> float:
        """Return the seconds until the link's queue has space; 0 means now."""
        return max(0.0, self.path.backlog_s(now_s) - self.queue_s)

    def pacing_wait_s(self, now_s: float, flow: Flow) -> float:
        """Return the seconds until `flow`'s congestion control and booked rate allow a send; 0 means now."""
        next_send_s = flow.next_send_s if flow.limit is None else max(flow.next_send_s, flow.limit.next_send_s)
        return max(0.0, next_send_s - now_s - self.queue_s)

    def admit(self, now_s: float, num_bytes: int, flow: Flow) -> float:
        """Send payload of `flow`; return the delivery time of its last byte. Flows stay in order.

        0 bytes stand for an end of stream or a handshake. The caller should check `queue_wait_s` and `pacing_wait_s`
        first; otherwise the queue only grows.
        """
        loss = self.link.loss
        num_wire_bytes = wire_bytes(num_bytes, self.segment_bytes) / (1 - loss) * (1 + self.link.duplication)
        arrival_s = self.path.admit(now_s, num_wire_bytes)
        if self.low_priority is not None:
            self.low_priority.path.yield_to(now_s, num_wire_bytes)
        if loss and self.link.congestion_control == "cubic":
            flow.next_send_s = max(now_s, flow.next_send_s) + num_bytes / self.flow_bytes_per_s
            arrival_s = max(arrival_s, flow.next_send_s + self.link.delay_s)
        if flow.limit is not None:
            flow.limit.next_send_s = max(now_s, flow.limit.next_send_s) + num_wire_bytes / flow.limit.bytes_per_s
            arrival_s = max(arrival_s, flow.limit.next_send_s + self.link.delay_s)
        flow.last_arrival_s = max(flow.last_arrival_s, arrival_s + self._retransmit_delay_s(num_bytes))
        return flow.last_arrival_s

    def _retransmit_delay_s(self, num_bytes: int) -> float:
        """Return the delay by lost packets: a round trip for each burst of them and each lost retransmission."""
        loss, round_trips = self.link.loss, 0
        if loss == 0:
            return 0.0
        lost = 1 - (1 - loss / self.link.loss_burst_packets) ** max(math.ceil(num_bytes / self.segment_bytes), 1)
        while self.rng.random() < lost:
            round_trips += 1
            lost = loss
        return round_trips * self.round_trip_s


def links_both_ways(pool: Pool) -> dict[tuple[str, str], Link]:
    """Return {(source, target): link} for every linked pair; a missing direction mirrors the other."""
    links: dict[tuple[str, str], Link] = {}
    for a, b in combinations([cluster.name for cluster in pool.clusters], 2):
        there, back = pool.link(a, b), pool.link(b, a)
        if there is not None or back is not None:
            links[a, b] = there or back.model_copy(update={"source": a, "target": b})  # type: ignore[union-attr]
            links[b, a] = back or there.model_copy(update={"source": b, "target": a})  # type: ignore[union-attr]
    return links
