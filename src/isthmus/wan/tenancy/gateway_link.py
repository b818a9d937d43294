"""`GatewayLink`: what a gateway knows of the link to one other site, from the heartbeats that both send.

The share of lost frames compares what was sent between two heartbeats with what came between them. Frames that wait in
a queue count as lost until they come, so the smaller of two windows counts.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from isthmus.wan.tenancy.flow_congestion import LinkQuality
from isthmus.wan.tenancy.packets.gateway_heartbeat import GatewayHeartbeat

HEARTBEAT_S = 0.1
SILENCE_S = 1.0
"""Without a heartbeat for so long, a site does not count as reached."""
WINDOWS = (10, 30)
"""Heartbeats, one and three seconds of them."""
MIN_FRAMES = 100
"""Fewer frames in a window say nothing about loss or marks."""
_KEPT = 128
_LEAST_S = 60.0
"""After which the least round trip is looked for again: a route may have changed."""


@dataclass
class FrameCounts:
    """Tenants' frames so far."""

    num_sent: int = 0
    num_heard: int = 0
    num_marked: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    num_sent: int
    num_heard: int
    num_marked: int


@dataclass
class GatewayLink:
    """The link to `site`. `epoch` is a random number of this start, from 1 to 2^32 - 1."""

    site: str
    address: bytes
    epoch: int
    own: FrameCounts = field(default_factory=FrameCounts)
    """Of frames that passed this process."""
    kernel: FrameCounts = field(default_factory=FrameCounts)
    """Of frames that passed by rules."""

    def __post_init__(self) -> None:
        self._number = 0
        self._sent: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._answers: deque[_Answer] = deque(maxlen=WINDOWS[-1] + 1)
        self._last: GatewayHeartbeat | None = None
        self._heard_s = self._least_at_s = -math.inf
        self._heard_counts = FrameCounts()
        self._least_s, self.round_trip_s = math.inf, math.nan
        self.num_missed = 0
        """Heartbeats of the other gateway that did not come."""

    def is_up(self, now_s: float) -> bool:
        """Whether the other gateway's heartbeats come."""
        return now_s - self._heard_s <= SILENCE_S

    def heartbeat(self, now_s: float) -> GatewayHeartbeat:
        """Return the next one to send."""
        self._number += 1
        self._sent.append((self._number, self.own.num_sent + self.kernel.num_sent))
        last = self._last
        if last is None:
            return GatewayHeartbeat(epoch=self.epoch, number=self._number, sent_us=_us(now_s))
        return GatewayHeartbeat(
            epoch=self.epoch, number=self._number, sent_us=_us(now_s), echo_epoch=last.epoch,
            echo_number=last.number, echo_sent_us=last.sent_us, held_us=min(_us(now_s - self._heard_s), 2**32 - 1),
            num_heard=self._heard_counts.num_heard, num_marked=self._heard_counts.num_marked,
        )  # fmt: skip

    def hear(self, heartbeat: GatewayHeartbeat, now_s: float) -> bool:
        """Take in one of the other gateway; return whether it is newer than those before."""
        last = self._last
        if last is not None and last.epoch == heartbeat.epoch:
            if heartbeat.number <= last.number:
                return False
            self.num_missed += heartbeat.number - last.number - 1
        else:
            self._answers.clear()
        self._last, self._heard_s = heartbeat, now_s
        self._heard_counts = FrameCounts(
            0, self.own.num_heard + self.kernel.num_heard, self.own.num_marked + self.kernel.num_marked
        )
        if heartbeat.echo_epoch == self.epoch:
            self._take_answer(heartbeat, now_s)
        return True

    def _take_answer(self, heartbeat: GatewayHeartbeat, now_s: float) -> None:
        num_sent = next((sent for number, sent in self._sent if number == heartbeat.echo_number), None)
        round_trip_s = now_s - (heartbeat.echo_sent_us + heartbeat.held_us) / 1e6
        if num_sent is None or not 0 <= round_trip_s <= _KEPT * HEARTBEAT_S:
            return
        self.round_trip_s = round_trip_s
        if round_trip_s <= self._least_s or now_s - self._least_at_s > _LEAST_S:
            self._least_s, self._least_at_s = round_trip_s, now_s
        self._answers.append(_Answer(num_sent, heartbeat.num_heard, heartbeat.num_marked))

    def quality(self, now_s: float) -> LinkQuality:
        """Return how the link is; nothing is known of one without heartbeats."""
        if not self.is_up(now_s) or not self._answers:
            return LinkQuality()
        losses, marked = list[float](), 0.0
        for window in WINDOWS:
            first, last = self._answers[max(len(self._answers) - 1 - window, 0)], self._answers[-1]
            num_sent, num_heard = last.num_sent - first.num_sent, last.num_heard - first.num_heard
            if num_sent < MIN_FRAMES or num_heard < 0:
                losses.append(0.0)
                continue
            losses.append(min(max(1 - num_heard / num_sent, 0.0), 1.0))
            if window == WINDOWS[0] and num_heard:
                marked = min(max((last.num_marked - first.num_marked) / num_heard, 0.0), 1.0)
        return LinkQuality(marked, max(self.round_trip_s - self._least_s, 0.0), min(losses))


def _us(seconds: float) -> int:
    return max(int(seconds * 1e6), 0)
