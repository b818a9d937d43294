"""Two sites on a virtual clock: NICs, gateways, and a link that delays, loses, repeats and reorders by seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_events import (
    GatewayInstruction,
    LinkDatagram,
    NicFrame,
    QueuePairFailed,
    SendOnLink,
    SendToNic,
    Tick,
)
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.nic import (
    MessageArrived,
    NicArrival,
    NicFailed,
    NicSettings,
    NicTick,
    PostWork,
    RoceNic,
    Transmit,
    WorkDone,
)
from isthmus.wan.roce.roce_view import view_frame

NEAR, FAR = 0, 1
LAN_S = 5e-6


@dataclass
class Line:
    """How a path treats what goes over it."""

    delay_s: float = 0.02
    loss: float = 0.0
    repeats: float = 0.0
    jitter_s: float = 0.0


@dataclass
class End:
    """A NIC in the lab, and what its user sees."""

    nic: RoceNic
    site: int
    arrived: list[bytes] = field(default_factory=list)
    done: list[bytes] = field(default_factory=list)
    failed: str | None = None


class GatewayLab:
    """`gateways[NEAR]` and `gateways[FAR]`; `connect` makes a queue pair between the sites."""

    def __init__(
        self,
        seed: int = 0,
        *,
        settings: GatewaySettings | None = None,
        link: Line | None = None,
        lan: Line | None = None,
        far_lan: Line | None = None,
        make: Callable[[GatewaySettings, int], Any] = Gateway,
    ) -> None:
        """`make` makes the gateways, of either form."""
        self._make = make
        self.rng, self.now_s = Random(seed), 0.0
        self.settings = settings or GatewaySettings(link_gbps=1, nic_gbps=10)
        self.link = link or Line()
        self.lans = [lan or Line(LAN_S), far_lan or lan or Line(LAN_S)]
        self.gateways: list[Gateway | None] = [self._gateway(), self._gateway()]
        self.ends: list[End] = []
        self.failures: list[tuple[int, QueuePairFailed]] = []
        self.max_held_bytes = [0, 0]
        self.link_up = True
        self.to_nic: list[list[bytes]] = [[], []]
        self.num_link_datagrams = self.num_link_bytes = 0
        self._by_key: dict[tuple[bytes, int], End] = {}
        self._queue: list[tuple[float, int, tuple[Any, ...]]] = []
        self._count = itertools.count()
        self._ports = itertools.count(50_000)
        self._pairs = itertools.count(17)
        self._planned: set[tuple[object, float]] = set()

    def connect(self, *, same_port: bool = False, **fields: Any) -> tuple[End, End]:
        """Set up a queue pair; `fields` are those of both NICs."""
        number, port = next(self._pairs), 50_000 if same_port else next(self._ports)
        near = {"address": "10.1.0.1", "peer": "10.2.0.1", "queue_pair": number, "peer_queue_pair": 0x8000 + number}
        far = {"address": "10.2.0.1", "peer": "10.1.0.1", "queue_pair": 0x8000 + number, "peer_queue_pair": number}
        found = []
        for site, own in ((NEAR, near), (FAR, far)):
            settings = NicSettings(**{**own, "source_port": port, **fields})
            found.append(self.plug(RoceNic(settings), site))
        return found[0], found[1]

    def plug(self, nic: RoceNic, site: int) -> End:
        """Put a NIC into a site; it replaces one with the same queue pair."""
        end, own = End(nic, site), nic.settings
        ends = bytes(map(int, own.peer.split("."))) + bytes(map(int, own.address.split(".")))
        self._by_key[ends, own.queue_pair] = end
        self.ends.append(end)
        return end

    def post(self, end: End, work: PostWork) -> None:
        """Give a NIC work."""
        self._nic(end, work)

    def restart(self, site: int, pause_s: float = 0.0) -> None:
        """Kill a gateway; another one with an empty table starts after `pause_s`."""
        self.gateways[site] = None
        self._later(self.now_s + pause_s, ("start", site))

    def run(self, until_s: float, *, stop_when_idle: bool = True) -> None:
        """Handle all events until `until_s`, or until all work is done."""
        self._plan_all()
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._queue)
            self._happen(*event)
            if stop_when_idle and all(one.nic.is_idle for one in self.ends) and self.is_drained():
                return
        self.now_s = max(self.now_s, until_s) if not stop_when_idle else self.now_s

    def is_drained(self) -> bool:
        """Whether no gateway keeps a frame."""
        return all(one is not None and one.held_bytes == 0 for one in self.gateways)

    # Events

    def _happen(self, kind: str, target: Any, data: Any = None) -> None:
        if kind == "nic":
            assert isinstance(target, End)
            assert isinstance(data, bytes)
            self._nic(target, NicArrival(data))
        elif kind == "nic tick":
            assert isinstance(target, End)
            self._planned.discard((id(target), self.now_s))
            if target.nic.next_tick_s() <= self.now_s:
                self._nic(target, NicTick())
            else:
                self._plan_nic(target)
        elif kind == "start":
            assert isinstance(target, int)
            self.gateways[target] = self._gateway()
            self._gateway_event(target, Tick())
        else:
            assert isinstance(target, int)
            if kind == "tick":
                self._planned.discard((target, self.now_s))
                self._gateway_event(target, Tick())
            elif kind == "frame":
                assert isinstance(data, bytes)
                self._gateway_event(target, NicFrame(data))
            else:
                assert isinstance(data, bytes)
                self._gateway_event(target, LinkDatagram(data))

    def _nic(self, end: End, event: PostWork | NicArrival | NicTick) -> None:
        for one in end.nic.handle(event, self.now_s):
            match one:
                case Transmit(frame):
                    self._over(self.lans[end.site], ("frame", end.site, frame))
                case WorkDone(data):
                    end.done.append(data)
                case MessageArrived(data):
                    end.arrived.append(data)
                case NicFailed(reason):
                    end.failed = reason
        self._plan_nic(end)

    def _gateway_event(self, site: int, event: NicFrame | LinkDatagram | Tick) -> None:
        gateway = self.gateways[site]
        if gateway is None:
            return
        for one in gateway.handle(event, self.now_s):
            self.carry_out(site, one)
        self.max_held_bytes[site] = max(self.max_held_bytes[site], gateway.held_bytes)
        self._plan_gateway(site)

    def carry_out(self, site: int, one: GatewayInstruction) -> None:
        """Do what a gateway says."""
        match one:
            case SendToNic(frame):
                self.to_nic[site].append(frame)
                view = view_frame(frame)
                if (end := self._by_key.get(view.key)) is not None:
                    self._over(self.lans[site], ("nic", end, frame))
            case SendOnLink(data):
                self.num_link_datagrams += 1
                self.num_link_bytes += len(data) + self.settings.datagram_overhead_bytes
                if self.link_up:
                    self._over(self.link, ("datagram", 1 - site, data))
            case QueuePairFailed():
                self.failures.append((site, one))

    def _over(self, line: Line, event: tuple[Any, ...]) -> None:
        copies = 1 + (self.rng.random() < line.repeats)
        for _ in range(copies):
            if self.rng.random() >= line.loss:
                late_s = self.rng.uniform(0, line.jitter_s) if line.jitter_s else 0.0
                self._later(self.now_s + line.delay_s + late_s, event)

    def _later(self, at_s: float, event: tuple[Any, ...]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._count), event))

    def _plan_all(self) -> None:
        for site in (NEAR, FAR):
            self._plan_gateway(site)
        for end in self.ends:
            self._plan_nic(end)

    def _plan_gateway(self, site: int) -> None:
        gateway = self.gateways[site]
        if gateway is not None:
            self._plan(site, max(self.now_s, gateway.next_tick_s(self.now_s)), ("tick", site))

    def _plan_nic(self, end: End) -> None:
        self._plan(id(end), max(self.now_s, end.nic.next_tick_s()), ("nic tick", end))

    def _plan(self, name: object, at_s: float, event: tuple[Any, ...]) -> None:
        if at_s < float("inf") and (name, at_s) not in self._planned:
            self._planned.add((name, at_s))
            self._later(at_s, event)

    def _gateway(self) -> Gateway:
        made: Gateway = self._make(self.settings, self.rng.randrange(1, 2**32))
        return made
