"""`IncomingFlow`: frames of one direction of a queue pair on their way from the far gateway to the NIC.

Frames are put in order by their number and handed to the NIC once. Requests are kept until the NIC acknowledges them:
towards it the gateway is the requester, and answers a NAK or a silence itself.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.wan.roce.dcqcn import DcqcnRate
from isthmus.wan.roce.gateway.gateway_datagram import (
    MAX_RANGES,
    NO_QUEUE_PAIR,
    NUMBER_SPAN,
    FeedbackEntry,
    FlowFailure,
)
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.held_bytes import HeldBytes
from isthmus.wan.roce.gateway.outgoing_flow import FRAME_BYTES
from isthmus.wan.roce.request_order import RequestOrder
from isthmus.wan.roce.roce_opcodes import psn_distance
from isthmus.wan.roce.roce_view import FlowKey, RoceView

MAX_UNPROVEN_BYTES = 2**20
"""Most bytes kept of requests whose answers cannot be told from those of another queue pair."""

UNPROVEN_S = 1.0
"""Longest time that such requests are kept."""


@dataclass(slots=True)
class HandedFrame:
    """A frame in the order of its flow."""

    number: int
    view: RoceView
    last_psn: int = -1
    """Last number of a request that the NIC has to answer, else -1."""
    is_pending: bool = False
    is_answered: bool = False
    wants_answer: bool = False


class IncomingFlow:
    """One direction; the gateway that owns it hands `next_frame` to the NIC."""

    def __init__(self, flow: int, view: RoceView, settings: GatewaySettings, total: HeldBytes) -> None:
        self.flow, self.key, self.source_port = flow, view.key, view.source_port
        self.order = RequestOrder()
        self.rate = DcqcnRate(settings.nic_bytes_per_s)
        self.queue_pair = NO_QUEUE_PAIR
        """The requester's queue pair, once it is known."""
        self.acked: int | None = None
        """Last number that the NIC has answered."""
        self.has_acknowledged = False
        """Whether the NIC has acknowledged a request of this flow."""
        self.failed: FlowFailure | None = None
        self.is_orphan = self.was_acknowledged_near = self.is_shared = False
        self.timer_s = self.suspect_s = math.inf
        self.used_s, self.due_s = 0.0, 0.0
        self.held_bytes = self.queue_bytes = 0
        self.floor, self.end = 0, 0
        self.num_nic_tries = 0
        self._early: dict[int, RoceView] = {}
        self._asked: list[tuple[float, int, int, bool]] = []
        self._queue: deque[HandedFrame] = deque()
        self._pending: deque[HandedFrame] = deque()
        self._pending_bytes = 0
        self._last_number, self._nic_s = 0, math.inf
        self._measured_s, self._measured_bytes = 0.0, 0
        """When the NIC's rate is measured from, not before frames wait for it, and what it was handed since."""
        self._latest, self._latest_s = 0, 0.0
        self._settings, self._total, self._most_bytes = settings, total, settings.max_flow_bytes

    @property
    def done(self) -> int:
        """The number below which every frame is done."""
        if self._pending:
            return self._pending[0].number
        return self._queue[0].number if self._queue else self.floor

    @property
    def is_done(self) -> bool:
        """Whether the NIC has every frame, and none is known to be missing."""
        return self.done == self.end

    # From the link

    def has(self, number: int) -> bool:
        """Return whether a frame has come before."""
        return number < self.floor or number in self._early

    def has_room(self, number: int, num_bytes: int) -> bool:
        """Return whether a frame may be kept."""
        size, total = num_bytes, self._total
        if number > self.end:
            size += FRAME_BYTES * (number - self.end)
        return self.held_bytes + size <= self._most_bytes and total.used + size <= total.most

    def add(self, number: int, view: RoceView, now_s: float) -> Sequence[RoceView]:
        """Take a frame that has not come before; return those that are in order now."""
        if number > self.end:
            heapq.heappush(self._asked, (now_s + self._settings.reorder_s, self.end, number, True))
            self._hold(FRAME_BYTES * (number - self.end))
        elif number < self.end:
            self._hold(-FRAME_BYTES)
        self._latest, self._latest_s = number, now_s
        self._hold(len(view.frame))
        if number == self.floor and not self._early:
            self.floor = number + 1
            self.end = max(self.end, self.floor)
            return (view,)
        self.end = max(self.end, number + 1)
        self._early[number] = view
        found: list[RoceView] = []
        while (next_view := self._early.pop(self.floor, None)) is not None:
            found.append(next_view)
            self.floor += 1
        return found

    def missing(self, now_s: float, again_s: float) -> tuple[tuple[int, int], ...]:
        """Return ranges to ask for now.

        Each is asked for twice, since feedback may be lost as well, and again if it has not come after `again_s`.
        """
        found: list[tuple[int, int]] = []
        while self._asked and self._asked[0][0] <= now_s and len(found) < MAX_RANGES:
            _, first, end, is_first = heapq.heappop(self._asked)
            repeat_s = min(self._settings.feedback_interval_s, again_s / 2)
            due_s = now_s + (repeat_s if is_first else again_s - repeat_s)
            for start, stop in self._holes(max(first, self.floor), end):
                heapq.heappush(self._asked, (due_s, start, stop, not is_first))
                for place in range(start, stop, 0xFFFF):
                    found.append((place % NUMBER_SPAN, min(stop - place, 0xFFFF)))
        return tuple(found)

    @property
    def ask_s(self) -> float:
        """When a missing frame is due to be asked for, infinite without one."""
        while self._asked and self._asked[0][2] <= self.floor:
            heapq.heappop(self._asked)
        return self._asked[0][0] if self._asked else math.inf

    def _holes(self, first: int, end: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for number in range(first, end):
            if number not in self._early:
                if found and found[-1][1] == number:
                    found[-1] = found[-1][0], number + 1
                else:
                    found.append((number, number + 1))
        return found

    def feedback(self, now_s: float, missing: tuple[tuple[int, int], ...]) -> FeedbackEntry:
        """Return what the far gateway should know."""
        spent_s = max(now_s - self._measured_s, 1e-6)
        rate = self._measured_bytes / spent_s
        self._measured_s, self._measured_bytes = now_s, 0
        return FeedbackEntry(
            self.flow, self.floor % NUMBER_SPAN, self.done % NUMBER_SPAN, int(rate / 1000), self.queue_bytes,
            self.queue_pair, self._latest % NUMBER_SPAN, int((now_s - self._latest_s) * 1e6), missing,
        )  # fmt: skip

    # To the NIC

    def queue(self, view: RoceView, last_psn: int, *, wants_answer: bool = False) -> None:
        """Queue a frame that came now for the NIC; requests that wait for its answer have a `last_psn`."""
        if not self._queue:
            self._measured_s, self._measured_bytes = self._latest_s, 0
        handed = HandedFrame(self._last_number, view, last_psn, wants_answer=wants_answer)
        self._queue.append(handed)
        self.queue_bytes += len(view.frame)

    def advance(self) -> None:
        """Count the next number in order."""
        self._last_number += 1

    @property
    def has_frames(self) -> bool:
        """Whether frames wait for the NIC."""
        return bool(self._queue)

    def next_frame(self, now_s: float) -> RoceView | None:
        """Return the next frame for the NIC; None if it was answered while it waited."""
        handed = self._queue.popleft()
        size = len(handed.view.frame)
        self.queue_bytes -= size
        if handed.is_answered:
            return None
        self._measured_bytes += size
        if handed.last_psn < 0:
            self._hold(-size)
            return handed.view
        if not handed.is_pending:
            handed.is_pending = True
            self._pending.append(handed)
            self._pending_bytes += size
        if handed.wants_answer and self._nic_s == math.inf:
            self._set_nic_timer(now_s)
        while self.queue_pair == NO_QUEUE_PAIR and self._pending_bytes > MAX_UNPROVEN_BYTES:
            self._pop_pending()
        return handed.view

    def answered(self, psn: int, now_s: float) -> bool:
        """Release requests up to `psn`; return whether there were any."""
        num_before = len(self._pending)
        if self.acked is None or psn_distance(self.acked, psn) > 0:
            self.acked = psn
        while self._pending and psn_distance(self._pending[0].last_psn, psn) >= 0:
            self._pop_pending()
        if len(self._pending) == num_before:
            return False
        self.num_nic_tries = 0
        self._nic_s = math.inf
        if self._pending and any(one.wants_answer for one in self._pending):
            self._set_nic_timer(now_s)
        return True

    def send_again(self, now_s: float, wait_s: float = 0.0) -> None:
        """Hand all requests without an answer to the NIC once more, after `wait_s`."""
        if not self._queue:
            self._measured_s, self._measured_bytes = now_s, 0
        waiting = {id(one) for one in self._pending}
        rest = [one for one in self._queue if id(one) not in waiting]
        self._queue = deque([*self._pending, *rest])
        self.queue_bytes = sum(len(one.view.frame) for one in self._queue)
        self.due_s = max(self.due_s, now_s + wait_s)
        self._set_nic_timer(now_s + wait_s)

    @property
    def is_suspect(self) -> bool:
        """Whether frames that were acknowledged may have been lost, and no request has proved that none was."""
        return self.suspect_s < math.inf

    def is_answered(self, psn: int) -> bool:
        """Return whether the NIC has answered a request with this number."""
        return self.acked is not None and psn_distance(psn, self.acked) >= 0

    def is_expected_at(self, psn: int) -> bool:
        """Return whether `psn` is that of a request that comes next."""
        return self.order.has_begun and psn == self.order.first_expected

    def is_pending(self, psn: int) -> bool:
        """Return whether a request with this number waits for the NIC's answer."""
        if not self._pending:
            return False
        first, last = self._pending[0].view.psn, self._pending[-1].last_psn
        return psn_distance(first, psn) >= 0 and psn_distance(psn, last) >= 0

    @property
    def unproven_s(self) -> float:
        """When requests whose answers cannot be told from others' are no longer kept."""
        if self.queue_pair != NO_QUEUE_PAIR or not self._pending or self._queue:
            return math.inf
        return self.used_s + UNPROVEN_S

    def release_unproven(self) -> None:
        """Stop keeping them: the NIC that sent them resends by itself."""
        while self._pending:
            self._pop_pending()

    @property
    def nic_s(self) -> float:
        """When the NIC's silence counts as a loss, infinite if no answer is due."""
        return self._nic_s if self._pending and self.queue_pair != NO_QUEUE_PAIR else math.inf

    def next_s(self, hand_wait_s: float) -> float:
        """Return when something is due; frames wait `hand_wait_s` longer than they must, so that several go at once."""
        if self.failed is not None:
            return math.inf
        due_s = self.suspect_s
        if self._asked:
            due_s = min(due_s, self.ask_s)
        if self._queue:
            due_s = min(due_s, self.due_s + hand_wait_s)
        return min(due_s, self.nic_s, self.unproven_s) if self._pending else due_s

    def drop(self, view: RoceView) -> None:
        """Release a frame in order that is not handed over."""
        self._hold(-len(view.frame))

    def clear(self) -> None:
        """Forget all frames."""
        self._hold(-self.held_bytes)
        self.queue_bytes = self._pending_bytes = 0
        self._early.clear()
        self._queue.clear()
        self._pending.clear()
        self._asked.clear()
        self.floor = self._last_number = self.end

    def begin_again(self) -> None:
        """Count frames from 0: the far gateway has lost its table. Requests at the NIC stay."""
        early = sum(len(view.frame) for view in self._early.values())
        self._hold(-early - FRAME_BYTES * (self.end - self.floor - len(self._early)))
        self._early.clear()
        self._asked.clear()
        self.floor = self.end = self._last_number = self._latest = 0
        for one in (*self._pending, *self._queue):
            one.number = 0

    def _hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._total.used += num_bytes

    def _pop_pending(self) -> None:
        handed = self._pending.popleft()
        handed.is_answered = True
        size = len(handed.view.frame)
        self._pending_bytes -= size
        self._hold(-size)

    def _set_nic_timer(self, now_s: float) -> None:
        self._nic_s = now_s + self._settings.nic_timeout_s * 2 ** min(self.num_nic_tries, 6)


def reverse_key(ends: bytes, queue_pair: int) -> FlowKey:
    """Return the key of the other direction, to `queue_pair`."""
    half = len(ends) // 2
    return ends[half:] + ends[:half], queue_pair
