"""A decision centre and its domains over messages that are lost, repeated, late and out of order, by seed."""

from __future__ import annotations

import heapq
import math
from random import Random

from isthmus.wan.control.wan_topology import PathRequest, TransferRequest, WanPipe, WanTopology
from isthmus.wan.controller.controller_messages import (
    AskPath,
    CentreEvent,
    CentreInstruction,
    FromDomain,
    PathChanged,
    TimePassed,
    ToDomain,
)
from isthmus.wan.controller.decision_centre import CentreTimes, DecisionCentre
from isthmus.wan.controller.domain_controller import DomainController

REPORT_S = 7.0


def pipe(name: str, ends: str, **fields: object) -> WanPipe:
    """Return a pipe of 1 Gbit/s and 1 ms from the first letter of `ends` to the second."""
    defaults: dict[str, object] = {"capacity_gbps": 1.0, "delay_ms": 1.0, "domain": "one"}
    return WanPipe.model_validate({"name": name, "from": ends[0], "to": ends[1]} | defaults | fields)


def ladder() -> WanTopology:
    """Return a short way over two domains from a to d, and a long one over a third: 1 Gbit/s each."""
    return WanTopology(
        pipes=(
            pipe("ab", "ab"),
            pipe("bd", "bd", domain="two"),
            pipe("ac", "ac", domain="three", delay_ms=5.0),
            pipe("cd", "cd", domain="two", delay_ms=5.0),
        )
    )


def ask(name: str = "r", gbps: float = 0.5, **fields: object) -> PathRequest:
    """Return a request from a to d."""
    return PathRequest.model_validate({"name": name, "from": "a", "to": "d", "bandwidth_gbps": gbps} | fields)


def send(name: str = "t", num_bytes: int = 10**9, deadline_s: float = 100.0, **fields: object) -> TransferRequest:
    """Return a transfer from a to d."""
    given = {"name": name, "from": "a", "to": "d", "num_bytes": num_bytes, "deadline_s": deadline_s}
    return TransferRequest.model_validate(given | fields)


class WanLab:
    """The whole network on a virtual clock. `fault` is the chance that a message is lost, and that it is repeated."""

    def __init__(self, topology: WanTopology, seed: int = 0, fault: float = 0.0, delay_s: float = 0.01) -> None:
        self.rng, self.fault, self.delay_s = Random(seed), fault, delay_s
        self.centre = DecisionCentre(topology, CentreTimes(lease_s=12.0, hold_s=20.0))
        self.domains = {
            name: DomainController(self.centre.network, name, 1) for name in sorted({p.domain for p in topology.pipes})
        }
        self.silent: set[str] = set()
        self.now_s = 0.0
        self.told: list[tuple[str, str]] = []
        self.reasons: dict[str, str] = {}
        self._queue: list[tuple[float, int, ToDomain | FromDomain]] = []
        self._num_messages = 0
        self._reports_s = REPORT_S

    def state(self, name: str) -> str:
        """Return what the client was told last."""
        return next((state for one, state in reversed(self.told) if one == name), "")

    def give(self, event: CentreEvent) -> None:
        """Pass an event to the centre, and send what it says."""
        for one in self.centre.handle(event, self.now_s):
            self._take(one)

    def ask(self, request: PathRequest | TransferRequest, *, holds: bool = False) -> None:
        """Ask for a path."""
        self.give(AskPath(request=request, holds=holds))

    def fail(self, domain: str, name: str, is_down: bool = True) -> None:
        """Let a pipe fail, or come back; its domain reports it."""
        self.domains[domain].set_down(name, is_down)
        self._post(self.domains[domain].report(self.now_s))

    def restart(self, domain: str) -> None:
        """Restart a domain's controller with an empty table."""
        old = self.domains[domain]
        new = self.domains[domain] = DomainController(self.centre.network, domain, old.epoch + 1)
        for name in old.bookings.down:
            new.set_down(name, True)
        self._post(new.report(self.now_s))

    def run(self, seconds: float) -> None:
        """Let time pass: deliver messages and timers in order; check the domains after each."""
        end_s = self.now_s + seconds
        while True:
            timer_s = self.centre.next_timer_s()
            message_s = self._queue[0][0] if self._queue else math.inf
            next_s = min(message_s, math.inf if timer_s is None else timer_s, self._reports_s)
            if next_s > end_s:
                break
            self.now_s = max(self.now_s, next_s)
            self._step()
        self.now_s = end_s

    def _step(self) -> None:
        if self._reports_s <= self.now_s:
            self._reports_s = self.now_s + REPORT_S
            for name, one in self.domains.items():
                if name not in self.silent:
                    self._post(one.report(self.now_s))
        while self._queue and self._queue[0][0] <= self.now_s:
            _, _, message = heapq.heappop(self._queue)
            if isinstance(message, FromDomain):
                self.give(message)
            elif message.domain not in self.silent:
                self._post(self.domains[message.domain].handle(message.order, self.now_s))
                assert self.domains[message.domain].invariants() == []
        timer_s = self.centre.next_timer_s()
        if timer_s is not None and timer_s <= self.now_s:
            self.give(TimePassed())
            assert (self.centre.next_timer_s() or math.inf) > self.now_s

    def _take(self, instruction: CentreInstruction) -> None:
        if isinstance(instruction, PathChanged):
            self.told.append((instruction.name, instruction.state))
            self.reasons[instruction.name] = instruction.reason
        else:
            self._post(instruction)

    def _post(self, message: ToDomain | FromDomain) -> None:
        if self.rng.random() < self.fault:
            return
        for _ in range(2 if self.rng.random() < self.fault else 1):
            delay_s = self.delay_s * (self.rng.uniform(0.1, 300.0) if self.rng.random() < self.fault else 1.0)
            self._num_messages += 1
            heapq.heappush(self._queue, (self.now_s + delay_s, self._num_messages, message))

    def committed(self, name: str) -> set[str]:
        """Return the domains that keep a booking for good."""
        found = set()
        for domain, one in self.domains.items():
            report = one.report(self.now_s).answer
            if any(key.name == name for key in getattr(report, "committed", ())):
                found.add(domain)
        return found
