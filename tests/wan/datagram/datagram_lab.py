"""Two datagram sessions joined by a line with a rate, a delay, a queue and faults, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from isthmus.wan.datagram.datagram_session import DatagramSession
from isthmus.wan.datagram.session_events import (
    DeliverFrame,
    EndSession,
    PacketArrived,
    SendFrame,
    SendPacket,
    SessionInstruction,
    TakeFrame,
    TimerFired,
)

HEADERS_BYTES = 53
"""Number, tag, UDP and IPv4."""


@dataclass
class Line:
    """One direction. `queue_s` is how long a packet may wait."""

    bytes_per_s: float
    delay_s: float
    queue_s: float = 1.0
    loss: float = 0.0
    duplicated: float = 0.0
    jitter_s: float = 0.0
    free_s: float = 0.0
    num_sent_bytes: int = 0
    num_dropped: int = 0

    def arrivals_s(self, num_bytes: int, now_s: float, rng: random.Random) -> list[float]:
        """Return when a packet that leaves now arrives, once for each copy."""
        if self.free_s - now_s > self.queue_s:
            self.num_dropped += 1
            return []
        self.num_sent_bytes += num_bytes
        self.free_s = max(self.free_s, now_s) + num_bytes / self.bytes_per_s
        if rng.random() < self.loss:
            return []
        copies = 1 + (rng.random() < self.duplicated)
        return [self.free_s + self.delay_s + rng.random() * self.jitter_s for _ in range(copies)]


@dataclass
class Side:
    """A session, the frames that its owner still has, and those that came."""

    session: DatagramSession
    line: Line
    frames: list[bytes]
    got: list[bytes] = field(default_factory=list)
    got_at_s: list[float] = field(default_factory=list)
    ended: str | None = None
    takes_frame: bool = True
    most_held_bytes: int = 0


class DatagramLab:
    """Runs both sides until nothing is left to happen, or until `until_s`."""

    def __init__(
        self, seed: int, one: Iterable[bytes], other: Iterable[bytes] = (), *, line: Callable[[], Line]
    ) -> None:
        self.now_s, self.rng = 0.0, random.Random(seed)
        self.sides = [Side(DatagramSession(0.0), line(), list(frames)) for frames in (one, other)]
        self._events: list[tuple[float, int, int, PacketArrived | TimerFired]] = []
        self._order, self._timers = itertools.count(), [float("inf")] * 2
        for number in range(2):
            self._offer(number)
            self._set_timer(number)

    def run(self, until_s: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let events happen in order of time."""
        while self._events and not done():
            at_s, _, number, event = self._events[0]
            if at_s > until_s:
                break
            heapq.heappop(self._events)
            self.now_s = at_s
            if isinstance(event, TimerFired):
                self._timers[number] = float("inf")
                if self.sides[number].session.next_due_s() > at_s + 1e-9:
                    self._set_timer(number)
                    continue
            self._carry_out(number, self.sides[number].session.handle(event, at_s))

    def has_all(self, num_one: int, num_other: int = 0) -> bool:
        """Tell whether both owners got all frames."""
        return (len(self.sides[1].got), len(self.sides[0].got)) == (num_one, num_other)

    def offer(self, number: int, frames: Iterable[bytes]) -> None:
        """Give the owner of a side more frames."""
        self.sides[number].frames += frames
        self._offer(number)
        self._set_timer(number)

    def _offer(self, number: int) -> None:
        side = self.sides[number]
        while side.takes_frame and side.frames:
            side.takes_frame = False
            self._carry_out(number, side.session.handle(SendFrame(side.frames.pop(0)), self.now_s))

    def _carry_out(self, number: int, instructions: list[SessionInstruction]) -> None:
        side = self.sides[number]
        side.most_held_bytes = max(side.most_held_bytes, side.session.num_held_bytes)
        for one in instructions:
            if isinstance(one, SendPacket):
                size = len(one.content) + HEADERS_BYTES
                for at_s in side.line.arrivals_s(size, self.now_s, self.rng):
                    self._push(at_s, 1 - number, PacketArrived(one.number, bytes(one.content)))
            elif isinstance(one, DeliverFrame):
                side.got.append(one.data)
                side.got_at_s.append(self.now_s)
            elif isinstance(one, TakeFrame):
                side.takes_frame = True
            elif isinstance(one, EndSession):
                side.ended = one.reason
        self._offer(number)
        self._set_timer(number)

    def _set_timer(self, number: int) -> None:
        due_s = self.sides[number].session.next_due_s()
        if due_s < self._timers[number]:
            self._timers[number] = due_s
            self._push(max(due_s, self.now_s), number, TimerFired())

    def _push(self, at_s: float, number: int, event: PacketArrived | TimerFired) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), number, event))
