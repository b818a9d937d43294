"""What one direction of a link does to what is sent on it, as arithmetic: times in, delivery times out.

`Path` is the wire: one queue in front of one rate, then delay and jitter. `Shaper` is what streams see of it:
headers cost wire bytes, and packet loss is modelled as the delay and the rate it causes, since a stream of
bytes cannot lose packets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

from isthmus.core.link_physics import SEGMENT_BYTES, effective_bytes_per_s, wire_bytes
from isthmus.core.pool import Link, Pool

CHUNK_S = 1e-3
"""Seconds of a link's rate that are handled as one chunk: the grain of sharing and of the emulator's work."""

MAX_CHUNK_BYTES = 256 * 1024
"""No chunk is larger, whatever the rate."""

MIN_QUEUE_S = 8e-3
"""The queue in front of a link holds one round trip of its rate, and at least this many seconds."""

JITTER_CORRELATION_S = 10e-3
"""How fast jitter changes (e-folding time). Independent draws for packets microseconds apart would, in an
order-preserving queue, only add their maximum to the delay of all."""


class Path:
    """The wire of one direction: a rate in wire bytes a second, one-way delay and jitter in seconds.

    The one-way delay is normally distributed with standard deviation `jitter_s`, cut off at 0, and changes
    with the correlation time `JITTER_CORRELATION_S` (an Ornstein-Uhlenbeck process); order is kept.
    """

    def __init__(self, bytes_per_s: float, delay_s: float, jitter_s: float, rng: Random) -> None:
        self.bytes_per_s, self.delay_s, self.jitter_s = bytes_per_s, delay_s, jitter_s
        self._rng = rng
        self._free_s = -math.inf
        self._last_s = -math.inf
        self._deviation = 0.0
        self._drawn_s = -math.inf

    def backlog_s(self, now_s: float) -> float:
        """Return how long what is queued keeps the wire busy from now."""
        return max(0.0, self._free_s - now_s)

    def admit(self, now_s: float, num_wire_bytes: float) -> float:
        """Queue wire bytes behind all earlier ones; return when the last arrives. `now_s` never falls."""
        self._free_s = max(now_s, self._free_s) + num_wire_bytes / self.bytes_per_s
        self._last_s = max(self._last_s, self._free_s + self._draw_delay_s())
        return self._last_s

    def yield_to(self, now_s: float, num_wire_bytes: float) -> None:
        """Lose the time that wire bytes which go first take."""
        self._free_s = max(now_s, self._free_s) + num_wire_bytes / self.bytes_per_s

    def _draw_delay_s(self) -> float:
        if self.jitter_s == 0:
            return self.delay_s
        keep = math.exp(min(self._drawn_s - self._free_s, 0.0) / JITTER_CORRELATION_S)
        fresh = math.sqrt(1 - keep * keep) * self._rng.gauss(0, 1)
        self._deviation, self._drawn_s = keep * self._deviation + fresh, self._free_s
        return max(0.0, self.delay_s + self._deviation * self.jitter_s)


@dataclass
class Flow:
    """One stream on a direction: when its own congestion control lets it send, and its last arrival."""

    clear_s: float = -math.inf
    last_s: float = -math.inf


@dataclass
class Shaper:
    """One direction of `link` as all streams on it share it; `reverse` is the way back (default: the same).

    Seeded: the same `rng`, times and sizes give the same deliveries. Sizes are payload bytes. What is sent
    here goes before what is sent `behind`, another shaper of the same wire, and takes its time from it.
    """

    link: Link
    rng: Random
    reverse: Link | None = None
    behind: Shaper | None = None
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        link = self.link
        self.path = Path(link.bytes_per_s, link.delay_s, link.jitter_ms / 1e3, self.rng)
        self.round_trip_s = link.delay_s + (self.reverse or link).delay_s
        self.flow_bytes_per_s = effective_bytes_per_s(link, self.reverse)
        self.queue_s = max(self.round_trip_s, MIN_QUEUE_S)

    @property
    def chunk_bytes(self) -> int:
        """Payload bytes to take from a stream at once: `CHUNK_S` of its rate, in whole segments."""
        wanted = min(self.flow_bytes_per_s * CHUNK_S, MAX_CHUNK_BYTES)
        return max(round(wanted / SEGMENT_BYTES), 1) * SEGMENT_BYTES

    @property
    def window_bytes(self) -> int:
        """Most bytes of one stream that may be on the way: delay, queue and two hold-ups of its rate."""
        on_the_way_s = self.link.delay_s + self.queue_s + 2 * self.round_trip_s + 8 * self.path.jitter_s
        return round(self.flow_bytes_per_s * on_the_way_s) + 4 * self.chunk_bytes

    def room_s(self, now_s: float) -> float:
        """Return in how many seconds the link's queue has room; 0 means now."""
        return max(0.0, self.path.backlog_s(now_s) - self.queue_s)

    def pace_s(self, now_s: float, flow: Flow) -> float:
        """Return in how many seconds `flow`'s own congestion control lets it send; 0 means now."""
        return max(0.0, flow.clear_s - now_s - self.queue_s)

    def admit(self, now_s: float, num_bytes: int, flow: Flow) -> float:
        """Send payload of `flow`; return when its last byte is delivered. Order within the flow is kept.

        0 bytes are the end of a stream or a handshake. The caller asks `room_s` and `pace_s` first: what is
        admitted against them only lengthens the queue.
        """
        loss = self.link.loss
        num_wire_bytes = wire_bytes(num_bytes) / (1 - loss)
        arrival_s = self.path.admit(now_s, num_wire_bytes)
        if self.behind is not None:
            self.behind.path.yield_to(now_s, num_wire_bytes)
        if loss and self.link.congestion_control == "cubic":
            flow.clear_s = max(now_s, flow.clear_s) + num_bytes / self.flow_bytes_per_s
            arrival_s = max(arrival_s, flow.clear_s + self.link.delay_s)
        flow.last_s = max(flow.last_s, arrival_s + self._held_up_s(num_bytes))
        return flow.last_s

    def _held_up_s(self, num_bytes: int) -> float:
        """Return what lost packets cost: one round trip, and one more each time the resend is lost."""
        loss, round_trips = self.link.loss, 0
        if loss == 0:
            return 0.0
        lost = 1 - (1 - loss) ** max(math.ceil(num_bytes / SEGMENT_BYTES), 1)
        while self.rng.random() < lost:
            round_trips += 1
            lost = loss
        return round_trips * self.round_trip_s


def both_ways(pool: Pool) -> dict[tuple[str, str], Link]:
    """Return the links of every joined pair in both directions; a missing one mirrors the other."""
    links: dict[tuple[str, str], Link] = {}
    for a, b in combinations([cluster.name for cluster in pool.clusters], 2):
        there, back = pool.link(a, b), pool.link(b, a)
        if there is not None or back is not None:
            links[a, b] = there or back.model_copy(update={"source": a, "target": b})  # type: ignore[union-attr]
            links[b, a] = back or there.model_copy(update={"source": b, "target": a})  # type: ignore[union-attr]
    return links
