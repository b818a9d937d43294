"""Two tunnels on a virtual clock, joined by legs that delay, lose, repeat, reorder and cut by seed."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from random import Random

from isthmus.wan.tunnel.tunnel import Tunnel
from isthmus.wan.tunnel.tunnel_events import (
    Accepted,
    Break,
    CloseLeg,
    Connect,
    DialFailed,
    DialLeg,
    EndWriting,
    FrameArrived,
    LegDown,
    LegReady,
    LegUp,
    OpenStream,
    Refused,
    SendFrame,
    SetReading,
    StreamConnected,
    StreamData,
    StreamEnded,
    StreamRefused,
    StreamTaken,
    Tick,
    TunnelEnded,
    TunnelEvent,
    Write,
)
from isthmus.wan.tunnel.tunnel_frame import FrameKind, TunnelFrame, parse_frame_header

NEAR, FAR = 0, 1


class Worker:
    """One end of a stream: what it sends, what it got, and how it ended."""

    def __init__(self, to_send: bytes) -> None:
        self.to_send, self.sent = to_send, 0
        self.got = bytearray()
        self.has_end = self.ended = self.is_reading = False
        self.broken: str | None = None


class TunnelLab:
    """`sides[NEAR]` dials. Time passes in `run`; `cut_probability` is that of a leg at each frame."""

    def __init__(
        self,
        seed: int,
        *,
        legs: int = 3,
        cut_probability: float = 0.0,
        repeat_probability: float = 0.0,
        reorder: bool = False,
        refuse: bool = False,
    ) -> None:
        self.rng = Random(seed)
        self.now_s = 0.0
        self.sides = [
            Tunnel(is_dialler=True, num_legs=legs, now_s=0.0),
            Tunnel(is_dialler=False, num_legs=0, now_s=0.0),
        ]
        self.workers: list[dict[int, Worker]] = [{}, {}]
        self.answers: dict[int, str] = {}
        self.ended: list[str | None] = [None, None]
        self.replies: dict[int, bytes] = {}
        self.max_held_bytes = [0, 0]
        self.num_cuts = 0
        self.can_dial = True
        self._cut, self._repeat, self._reorder, self._refuse = cut_probability, repeat_probability, reorder, refuse
        self._legs: set[int] = set()
        self._up_s: dict[int, float] = {}
        """When both sides have a leg; what comes on it before then waits in its socket."""
        self._order: dict[tuple[int, int], float] = defaultdict(float)
        self._queue: list[tuple[float, int, int, TunnelEvent]] = []
        self._count, self._names = itertools.count(), itertools.count()

    def open(self, data: bytes, reply: bytes = b"") -> int:
        """Open a stream whose worker sends `data`; the far one sends `reply`."""
        stream = self.sides[NEAR].next_stream
        self.workers[NEAR][stream] = Worker(data)
        self.replies[stream] = reply
        self.handle(NEAR, OpenStream(stream, f"10.0.0.2:{7000 + stream % 100}"))
        return stream

    @property
    def legs(self) -> list[int]:
        """Legs that stand."""
        return sorted(self._legs)

    def cut(self, leg: int) -> None:
        """Break a leg: what is on its way is lost, and both sides notice at some time."""
        if leg in self._legs:
            self.num_cuts += 1
            self._legs.remove(leg)
            for side in (NEAR, FAR):
                self._later(self.rng.uniform(0, 0.5), side, LegDown(leg))

    def cut_all(self) -> None:
        """Break every leg."""
        for leg in self.legs:
            self.cut(leg)

    def run(self, until_s: float = 1e4) -> None:
        """Handle all events until `until_s`, or until only pings are left."""
        while self.now_s < until_s and not self._is_quiet():
            ticks = [side.next_tick_s() for side in self.sides]
            first_s = self._queue[0][0] if self._queue else float("inf")
            side = min((NEAR, FAR), key=lambda one: ticks[one])
            if ticks[side] <= first_s:
                self.now_s = max(self.now_s, ticks[side])
                self.handle(side, Tick())
                continue
            self.now_s, _, side, event = heapq.heappop(self._queue)
            if isinstance(event, FrameArrived | LegReady) and event.leg not in self._legs:
                continue
            self.handle(side, event)

    def handle(self, side: int, event: TunnelEvent) -> None:
        """Pass an event to a side and carry out what it says."""
        for instruction in self.sides[side].handle(event, self.now_s):
            self._carry_out(side, instruction)
        self.max_held_bytes[side] = max(self.max_held_bytes[side], self.sides[side].num_held_bytes)

    def _carry_out(self, side: int, instruction: object) -> None:
        match instruction:
            case SendFrame(leg, frame):
                self._transmit(side, leg, frame)
            case DialLeg(index):
                self._dial(index)
            case CloseLeg(leg):
                if leg in self._legs:
                    self._legs.remove(leg)
                    self._later(0.05, 1 - side, LegDown(leg))
            case Accepted(stream):
                self.answers[stream] = "accepted"
            case Refused(stream, reason):
                self.answers[stream] = reason
            case TunnelEnded(reason):
                self.ended[side] = reason
            case _:
                self._serve_worker(side, instruction)
        self._feed(side)

    def _serve_worker(self, side: int, instruction: object) -> None:
        match instruction:
            case Connect(stream, _) if self._refuse:
                self._later(0.001, side, StreamRefused(stream, "502 refused"))
            case Connect(stream, _):
                self.workers[FAR][stream] = Worker(self.replies[stream])
                self._later(0.001, side, StreamConnected(stream))
            case Write(stream, data):
                worker = self.workers[side][stream]
                assert not worker.ended, "bytes after the end"
                worker.got += data
                self._later(self.rng.uniform(0, 0.01), side, StreamTaken(stream, len(data)))
            case EndWriting(stream):
                assert not self.workers[side][stream].ended, "two ends"
                self.workers[side][stream].ended = True
            case SetReading(stream, is_on):
                self.workers[side][stream].is_reading = is_on
            case Break(stream, reason):
                if (worker := self.workers[side].get(stream)) is not None:
                    worker.broken = reason

    def _feed(self, side: int) -> None:
        for stream, worker in self.workers[side].items():
            if not worker.is_reading or worker.has_end:
                continue
            size = self.rng.choice((1, 100, 1400, 65536, 300_000))
            chunk = worker.to_send[worker.sent : worker.sent + size]
            worker.sent += len(chunk)
            worker.is_reading = False
            if chunk:
                self._later(0.0001, side, StreamData(stream, chunk))
                worker.is_reading = True
            else:
                worker.has_end = True
                self._later(0.0001, side, StreamEnded(stream))

    def _transmit(self, side: int, leg: int, frame: TunnelFrame) -> None:
        if leg not in self._legs:
            return
        parsed, num_bytes = parse_frame_header(frame.header())
        assert num_bytes == len(frame.payload)
        whole = TunnelFrame(parsed.kind, parsed.number, parsed.stream, parsed.offset, bytes(frame.payload))
        key = side, leg
        arrival_s = max(self.now_s + self.rng.uniform(0.01, 0.03), self._up_s[leg])  # a leg keeps what comes early
        if not self._reorder:
            arrival_s = self._order[key] = max(arrival_s, self._order[key])
        self._later(arrival_s - self.now_s, 1 - side, FrameArrived(leg, whole))
        if frame.kind is not FrameKind.PING and self.rng.random() < self._repeat:
            self._later(self.rng.uniform(0.01, 0.1), 1 - side, FrameArrived(leg, whole))
        self._later(self.rng.uniform(0.0001, 0.002), side, LegReady(leg))
        if frame.kind is not FrameKind.PING and self.rng.random() < self._cut:
            self.cut(leg)

    def _dial(self, index: int) -> None:
        if not self.can_dial or (self._cut and self.rng.random() < 0.2):
            self._later(0.02, NEAR, DialFailed(index))
            return
        leg = next(self._names)
        self._legs.add(leg)
        self._up_s[leg] = self.now_s + 0.04
        self._later(0.04, NEAR, LegUp(leg, index))
        self._later(0.02, FAR, LegUp(leg, index))

    def _later(self, delay_s: float, side: int, event: TunnelEvent) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._count), side, event))

    def _is_quiet(self) -> bool:
        """Whether all streams are over, and all frames acknowledged."""
        return self.now_s > 1 and not any(
            side.num_streams or side.num_unacknowledged_bytes or side.num_held_bytes for side in self.sides
        )
