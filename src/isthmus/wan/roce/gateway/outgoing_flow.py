"""`OutgoingFlow`: frames of one direction of a queue pair on their way to the far gateway.

Every frame has a number in its flow and is kept until the far NIC has it. What the far gateway names as missing goes
again, nothing else; a timer above the round trip covers what it cannot name.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from isthmus.wan.roce.gateway.gateway_datagram import NUMBER_SPAN, FeedbackEntry, FlowFailure, full_number
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.held_bytes import HeldBytes
from isthmus.wan.roce.near_responder import NearResponder
from isthmus.wan.roce.request_order import RequestOrder
from isthmus.wan.roce.roce_view import RoceView

FRAME_BYTES = 64
"""What a kept frame takes beside its bytes."""

RATE_GAIN = 1.25
"""Growth of a flow's rate in each feedback without a queue at the far side."""

DRAIN_SHARE = 0.9
"""Share of the far side's rate while it has a queue."""


SOONEST = 0.98
"""Share of the least round trip before which nothing can be known of a frame that was sent."""

NO_START = (-1, 0)
LOST_TRIES = 2
"""Tries after which a frame that is still missing goes twice at once: others wait for it."""


@dataclass(slots=True)
class _KeptFrame:
    frame: bytes
    sent_s: float = -math.inf
    num_tries: int = 0
    is_timed: bool = False


class OutgoingFlow:
    """One direction; the gateway that owns it decides when `next_frame` may go."""

    def __init__(self, flow: int, view: RoceView, settings: GatewaySettings, total: HeldBytes) -> None:
        self.flow, self.key, self.source_port = flow, view.key, view.source_port
        self.order = RequestOrder()
        self.responder = NearResponder(is_on=settings.acknowledge_near)
        self.is_paired = False
        self._total, self._most_bytes = total, settings.max_flow_bytes
        self.failed: FlowFailure | None = None
        self.timer_s, self.due_s = math.inf, 0.0
        self.rate_bytes_per_s = math.inf
        self.held_bytes = self.unsent_bytes = self.notified_bytes = 0
        self.used_s = self.notified_s = self.rewound_s = self.read_again_s = -math.inf
        self.heard_s = self.probed_s = -math.inf
        self.is_ready = False
        self.num_silent = 0
        """Timeouts since the last feedback."""
        self._kept: dict[int, _KeptFrame] = {}
        self._next = self._next_unsent = self._floor = self.done = 0
        self._again: deque[int] = deque()
        self.starts_ahead = NO_START
        """Number of a first packet that came out of order, and how often in a row."""

    @property
    def is_done(self) -> bool:
        """Whether the far NIC has every frame."""
        return not self._kept

    @property
    def queue_bytes(self) -> int:
        """Bytes of the queue that the flow waits in: all flows' at the link's rate, else its own."""
        return self._total.unsent if self.rate_bytes_per_s == math.inf else self.unsent_bytes

    @property
    def can_send(self) -> bool:
        """Whether a frame waits."""
        return self._next_unsent < self._next or bool(self._again)

    def has_room(self, frame: bytes) -> bool:
        """Return whether a frame may be kept."""
        size, total = len(frame) + FRAME_BYTES, self._total
        return self.held_bytes + size <= self._most_bytes and total.used + size <= total.most

    def add(self, frame: bytes) -> None:
        """Keep a frame under the next number."""
        self._kept[self._next] = _KeptFrame(frame)
        self._next += 1
        size, total = len(frame), self._total
        self.held_bytes += size + FRAME_BYTES
        total.used += size + FRAME_BYTES
        self.unsent_bytes += size
        total.unsent += size

    def next_frame(self, now_s: float) -> tuple[int, bytes, bool] | None:
        """Return number and bytes of the frame to send now, and whether it was sent before: those go first."""
        while self._again:
            number = self._again.popleft()
            kept = self._kept.get(number)
            if kept is not None:
                break
        else:
            number = self._next_unsent
            if number >= self._next:
                return None
            kept = self._kept[number]
            self._next_unsent = number + 1
            size = len(kept.frame)
            self.unsent_bytes -= size
            self._total.unsent -= size
        kept.sent_s = now_s
        kept.num_tries += 1
        return number, kept.frame, kept.num_tries > 1

    def take_feedback(self, entry: FeedbackEntry, now_s: float, round_trip_s: float) -> tuple[float | None, int]:
        """Release what is done and send again what is missing.

        Returns a sample of the round trip, and the most tries of a frame that is missing.
        """
        floor = full_number(entry.low_floor, self._floor)
        done = full_number(entry.low_done, self.done)
        if not (self.done <= done <= floor <= self._next_unsent):
            return None, 0
        self.num_silent, self.heard_s, sample_s, released = 0, now_s, None, 0
        latest = self._kept.get(full_number(entry.low_latest, self._floor))
        if latest is not None and latest.num_tries == 1 and not latest.is_timed:
            latest.is_timed = True
            sample_s = max(0.0, now_s - latest.sent_s - entry.age_us * 1e-6)
        self._floor = floor
        if done > self.done:
            for number in range(self.done, done):
                released += len(self._kept.pop(number).frame) + FRAME_BYTES
            self.done = done
            self._hold(-released)
        return sample_s, self._ask_again(entry.missing, now_s, round_trip_s) if entry.missing else 0

    def adapt_rate(self, entry: FeedbackEntry, queue_bytes: float, most_bytes_per_s: float) -> None:
        """Set the rate by the far side's queue and rate."""
        if entry.held_bytes > queue_bytes:
            self.rate_bytes_per_s = max(entry.kilobytes_per_s * 1000 * DRAIN_SHARE, most_bytes_per_s / 1000)
        elif self.rate_bytes_per_s < math.inf:
            grown = self.rate_bytes_per_s * RATE_GAIN
            self.rate_bytes_per_s = grown if grown < most_bytes_per_s else math.inf

    def silent_s(self, timeout_s: float) -> float:
        """Return when the far gateway's silence counts as a loss; the wait doubles with each try."""
        oldest_s = self.oldest_sent_s()
        if oldest_s is None:
            oldest_s = max(self.heard_s, self._kept[self.done].sent_s) if self._kept else self.heard_s
        return max(oldest_s, self.probed_s) + timeout_s * (1 << min(self.num_silent, 4))

    def oldest_sent_s(self) -> float | None:
        """Return when the oldest frame that has not come was sent; None without one, or if it waits to go again."""
        if self._floor >= self._next_unsent or self._again:
            return None
        return self._kept[self._floor].sent_s

    @property
    def awaits_feedback(self) -> bool:
        """Whether frames were sent that are not done."""
        return self.done < self._next_unsent

    def send_oldest_again(self) -> int:
        """Queue the oldest frame that has not come; return how often it was sent."""
        self._again.append(self._floor)
        return self._kept[self._floor].num_tries

    def begin_again(self, flow: int) -> None:
        """Number all kept frames from 0 under another flow: the far gateway has lost its table."""
        self.flow = flow
        self._kept = {place: _KeptFrame(kept.frame) for place, kept in enumerate(self._kept.values())}
        self._next, self._next_unsent, self._floor, self.done = len(self._kept), 0, 0, 0
        self._again.clear()
        self._wait(sum(len(kept.frame) for kept in self._kept.values()) - self.unsent_bytes)
        self.num_silent, self.rate_bytes_per_s = 0, math.inf

    def clear(self) -> None:
        """Forget all frames."""
        self._hold(-self.held_bytes)
        self._wait(-self.unsent_bytes)
        self._kept.clear()
        self._again.clear()
        self._next_unsent = self._floor = self.done = self._next

    def _hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._total.used += num_bytes

    def _wait(self, num_bytes: int) -> None:
        self.unsent_bytes += num_bytes
        self._total.unsent += num_bytes

    def _ask_again(self, missing: tuple[tuple[int, int], ...], now_s: float, round_trip_s: float) -> int:
        most = 0
        for low, count in missing:
            first = full_number(low % NUMBER_SPAN, self._floor)
            for number in range(max(first, self._floor), min(first + count, self._next_unsent)):
                kept = self._kept.get(number)
                if kept is None or now_s - kept.sent_s < SOONEST * round_trip_s:
                    continue  # the one sent last is still on its way
                kept.sent_s = now_s
                most = max(most, kept.num_tries)
                self._again.extend([number] * (2 if kept.num_tries >= LOST_TRIES else 1))
        return most
