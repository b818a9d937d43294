"""Queue pairs across a link on a virtual clock: NICs alone, or through two gateways; the same link for both."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_events import GatewayEvent, LinkDatagram, NicFrame, SendOnLink, SendToNic, Tick
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.nic import (
    MessageArrived,
    NicArrival,
    NicEvent,
    NicFailed,
    NicSettings,
    NicTick,
    PostWork,
    RoceNic,
    Transmit,
)
from isthmus.wan.roce.roce_view import view_frame

LAN_S = 5e-6
MESSAGE_BYTES = 65_536
FIRST_BYTES = 64
"""Size of the one message by which queue pairs are learned before `start_s`."""


@dataclass
class VirtualLine:
    """One direction of a link: a rate, a delay, loss, and a queue that drops its tail.

    The queue has a round trip's bytes, at least `least_queue_bytes`.
    """

    gbps: float
    delay_s: float
    loss: float
    rng: Random
    least_queue_bytes: float = 0.0
    free_s: float = 0.0
    num_bytes: int = 0
    num_dropped: int = 0
    most_queued_bytes: float = 0.0

    def arrival_s(self, num_bytes: int, now_s: float) -> float | None:
        """Return when bytes that are sent now arrive; None if they are dropped or lost."""
        rate = self.gbps * 1e9 / 8
        queued = max(0.0, self.free_s - now_s) * rate
        if queued > max(2 * self.delay_s * rate, self.least_queue_bytes):
            self.num_dropped += 1
            return None
        self.most_queued_bytes = max(self.most_queued_bytes, queued)
        self.num_bytes += num_bytes
        self.free_s = max(self.free_s, now_s) + num_bytes / rate
        return None if self.rng.random() < self.loss else self.free_s + self.delay_s


@dataclass
class Sender:
    """A queue pair whose near NIC sends without end."""

    near: RoceNic
    far: RoceNic
    num_bytes: int = 0
    failed: str | None = None
    waiting: deque[int] = field(default_factory=deque)


class RoceLab:
    """A link with `num_pairs` queue pairs; with `settings` through gateways, else NIC to NIC."""

    def __init__(
        self, *, gbps: float, round_trip_s: float, loss: float, settings: GatewaySettings | None,
        num_pairs: int = 1, seed: int = 20, start_s: float = 0.0, least_queue_bytes: float = 0.0, **nic: object,
    ) -> None:  # fmt: skip
        self.now_s, self.settings, self._start_s = 0.0, settings, start_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        rng = Random(seed)
        self.lines = [
            VirtualLine(gbps, round_trip_s / 2, loss, Random(rng.random()), least_queue_bytes) for _ in range(2)
        ]
        self.gateways = [] if settings is None else [Gateway(settings, number) for number in (1, 2)]
        self.senders = [self._pair(number, nic) for number in range(num_pairs)]
        self._due: dict[int, float] = {}
        self.on_nic: Callable[[bytes], None] = lambda _: None

    def _pair(self, number: int, fields: dict[str, object]) -> Sender:
        base = {"source_port": 49_152 + number, "max_retries": 10**9} | fields
        near = NicSettings(
            address="10.1.0.1", peer="10.2.0.1", queue_pair=100 + number, peer_queue_pair=50_000 + number, **base
        )  # type: ignore[arg-type]
        far = NicSettings(
            address="10.2.0.1", peer="10.1.0.1", queue_pair=50_000 + number, peer_queue_pair=100 + number, **base
        )  # type: ignore[arg-type]
        return Sender(RoceNic(near), RoceNic(far))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        if not self._due:
            for site in range(len(self.gateways)):
                self._gateway(site, Tick())
            for sender in self.senders:
                if self._start_s:
                    self._nic(sender, sender.near, PostWork("write", bytes(FIRST_BYTES)))
                self._later(self._start_s, partial(self._nic, sender, sender.near, NicTick()))
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(queue)
            act()
        self.now_s = until_s

    def _later(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._count), act))

    def _nic(self, sender: Sender, nic: RoceNic, event: NicEvent) -> None:
        is_near = nic is sender.near
        for one in nic.handle(event, self.now_s):
            if isinstance(one, Transmit):
                self._from_nic(sender, one.frame, is_near)
            elif isinstance(one, MessageArrived):
                sender.num_bytes += len(one.data)
            elif isinstance(one, NicFailed):
                sender.failed = one.reason
        has_begun = is_near and self.now_s >= self._start_s and sender.failed is None
        if has_begun and nic.num_waiting_packets < MESSAGE_BYTES // 1024:
            self._nic(sender, nic, PostWork("write", bytes(MESSAGE_BYTES)))
            return
        self._plan(id(nic), nic.next_tick_s(), lambda: self._nic(sender, nic, NicTick()))

    def _from_nic(self, sender: Sender, frame: bytes, is_near: bool) -> None:
        site = 0 if is_near else 1
        if self.gateways:
            self._later(self.now_s + LAN_S, lambda: self._gateway(site, NicFrame(frame)))
            return
        arrival_s = self.lines[site].arrival_s(len(frame), self.now_s)
        if arrival_s is not None:
            target = sender.far if is_near else sender.near
            self._later(arrival_s, lambda: self._nic(sender, target, NicArrival(frame)))

    def _gateway(self, site: int, event: GatewayEvent) -> None:
        gateway = self.gateways[site]
        for one in gateway.handle(event, self.now_s):
            if isinstance(one, SendOnLink):
                self._on_link(site, one.data)
            elif isinstance(one, SendToNic):
                self._to_nic(site, one.frame)
        self._plan(site, gateway.next_tick_s(self.now_s), lambda: self._gateway(site, Tick()))

    def _on_link(self, site: int, data: bytes) -> None:
        overhead = self.settings.datagram_overhead_bytes if self.settings is not None else 0
        arrival_s = self.lines[site].arrival_s(len(data) + overhead, self.now_s)
        if arrival_s is not None:
            self._later(arrival_s, lambda: self._gateway(1 - site, LinkDatagram(data)))

    def _to_nic(self, site: int, frame: bytes) -> None:
        number = view_frame(frame).queue_pair - (50_000 if site else 100)
        sender = self.senders[number]
        nic = sender.far if site else sender.near
        if not site:
            self.on_nic(frame)
        self._later(self.now_s + LAN_S, lambda: self._nic(sender, nic, NicArrival(frame)))

    def _plan(self, name: int, at_s: float, act: Callable[[], None]) -> None:
        """Wake something at `at_s`, unless it is woken earlier."""
        known_s = self._due.get(name, math.inf)
        at_s = max(at_s, self.now_s)
        if at_s >= known_s:
            return
        self._due[name] = at_s

        def wake() -> None:
            if self._due.get(name) == at_s:
                self._due[name] = math.inf
                act()

        self._later(at_s, wake)


def goodput_mbps(lab: RoceLab, skip_s: float, window_s: float) -> list[float]:
    """Return what each queue pair delivers in a window, in Mbit/s."""
    lab.run(skip_s)
    before = [sender.num_bytes for sender in lab.senders]
    lab.run(skip_s + window_s)
    return [(one.num_bytes - was) * 8e-6 / window_s for one, was in zip(lab.senders, before, strict=True)]
