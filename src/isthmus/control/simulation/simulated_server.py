"""`SimulatedServer`: the coordinator on a virtual clock, with a durable log and a planner.

Like the real server it admits an event, appends it, handles it and only then answers. (The real server
handles a batch before it appends it; a crash between the two leaves the same log.) After a crash the
coordinator is rebuilt from the log.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from isthmus.control.algorithms.global_order import Objective
from isthmus.control.coordinator.coordinator import Coordinator, Rules
from isthmus.control.simulation.faults.fault_rates import Faults
from isthmus.control.state.events import (
    AgentReported,
    EpochBegan,
    Event,
    Instruction,
    JobChanged,
    MakePlans,
    PlansMade,
    PoolSet,
    Restarted,
)
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Link
from isthmus.sim.kernel import Kernel


class EventLog(Protocol):
    """The server's log, which survives crashes."""

    def append(self, events: Sequence[Event]) -> None:
        """Append events; they are on disk when this returns."""

    def tear(self, events: Sequence[Event], rng: random.Random) -> None:
        """Simulate a crash during an append: all events are stored or none."""

    def events(self) -> Iterable[Event]:
        """Return the stored events in order."""


class ListLog:
    """A log in memory."""

    def __init__(self) -> None:
        self.kept: list[Event] = []

    def append(self, events: Sequence[Event]) -> None:
        """Append events; see `EventLog`."""
        self.kept.extend(events)

    def tear(self, events: Sequence[Event], rng: random.Random) -> None:
        """Store all events or none; see `EventLog`."""
        self.kept.extend(events if rng.random() < 0.5 else ())

    def events(self) -> Iterable[Event]:
        """Return the stored events; see `EventLog`."""
        return tuple(self.kept)


class _Died(Exception):  # noqa: N818 - control flow, not an error
    """The server's process has crashed."""


@dataclass(frozen=True, kw_only=True)
class QueueRules:
    """The operator's links and queue settings; see `PoolSet`."""

    links: tuple[Link, ...] = ()
    objective: Objective = "arrival"
    patience_s: float = 3600.0


class SimulatedServer:
    """The server on `kernel`'s clock, with the operator's settings `queue`.

    `plan` answers planning requests, `planning_s` after they are made. Without a `log` the server never
    crashes. `observe` is called with the id of every changed job, `check` with the server and its time after
    every event. `up_s` is when it last started, the attributes `deciding_s` and `planning_s` are wall-clock
    seconds spent in the coordinator and in the planner, `counts` counts events by kind.
    """

    def __init__(
        self,
        kernel: Kernel,
        plan: Callable[[MakePlans], PlanSet],
        *,
        queue: QueueRules,
        rules: Rules | None = None,
        planning_s: float = 0.01,
        log: EventLog | None = None,
        faults: Faults | None = None,
        observe: Callable[[str], None] = lambda _: None,
        check: Callable[[SimulatedServer, float], None] | None = None,
    ) -> None:
        self._kernel, self._plan, self._rules, self._planning_s = kernel, plan, rules, planning_s
        self._log, self._faults, self._observe, self._check = log, faults or Faults(), observe, check
        self.down_until_s, self.up_s, self._skew_s, self._life = 0.0, 0.0, 0.0, 0
        self.deciding_s = self.planning_s = 0.0
        self.counts: Counter[str] = Counter()
        self.coordinator = Coordinator(rules)
        self._queue = queue
        kernel.call(kernel.now, self._begin)

    @property
    def clock_s(self) -> float:
        """The time by the server's clock, which may be skewed."""
        return self._kernel.now + self._skew_s

    @property
    def down(self) -> bool:
        """Whether the server is down."""
        return self._kernel.now < self.down_until_s

    def tell(self, event: Callable[[float], Event]) -> None:
        """Append a user's event, made with the server's time.

        Raises `UnavailableError` if the server does not answer; the event may be appended or not.
        """
        if self.down:
            raise UnavailableError("no answer from the server")
        try:
            self._commit(event(self.clock_s))
            self._maybe_die("server dies before it answers")
        except _Died:
            raise UnavailableError("no answer from the server") from None

    def exchange(self, report: AgentReport) -> AgentOrders | None:
        """Apply an agent's report and return its orders, None if the server does not answer."""
        if self.down:
            return None
        name = report.cluster.name
        try:
            self._commit(AgentReported.of(report, self.clock_s))
            coordinator, began_s = self.coordinator, time.perf_counter()
            coordinator.hear(name, self.clock_s, report)
            orders = AgentOrders(
                fence=coordinator.epoch, parts=coordinator.orders(name), queue=coordinator.queue(name)
            )
            self.deciding_s += time.perf_counter() - began_s
            self._maybe_die("server dies before it answers")
        except _Died:
            return None
        return orders

    def tick(self, reachable: Iterable[str]) -> None:
        """Record contact with the `reachable` sites and append the events that are due."""
        if self.down:
            return
        now_s = self.clock_s
        for name in reachable:
            self.coordinator.hear(name, now_s)
        try:
            began_s = time.perf_counter()
            due = self.coordinator.due(now_s)
            self.deciding_s += time.perf_counter() - began_s
            for event in due:
                self._commit(event)
        except _Died:
            return

    def _commit(self, event: Event) -> None:
        # Step 1: admit the event.
        began_s = time.perf_counter()
        admitted = self.coordinator.admit(event)
        self.deciding_s += time.perf_counter() - began_s
        if not admitted:
            return
        # Step 2: append it.
        self.counts[event.kind] += 1
        self._maybe_die("server dies before the append")
        if self._log is not None:
            if self._faults.strikes("server dies between write and flush"):
                self._log.tear([event], self._faults.rng)
                self._die()
            self._log.append([event])
        self._maybe_die("server dies between append and handle")
        # Step 3: handle it and execute the instructions.
        began_s = time.perf_counter()
        instructions = self.coordinator.handle(event)
        self.deciding_s += time.perf_counter() - began_s
        self._act(instructions)
        if self._check is not None:
            self._check(self, self.clock_s)

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, MakePlans):
                at_s = self._kernel.now + self._planning_s
                self._kernel.call(at_s, self._answer, (self._life, instruction))
            elif isinstance(instruction, JobChanged):
                self._observe(instruction.job_id)

    def _answer(self, asked: tuple[int, MakePlans]) -> None:
        life, request = asked
        if life != self._life or self.down:
            return
        began_s = time.perf_counter()
        plans = self._plan(request)
        self.planning_s += time.perf_counter() - began_s
        event = PlansMade(now_s=self.clock_s, job_id=request.job_id, round=request.round, plans=plans)
        try:
            self._commit(event)
        except _Died:
            return

    def _maybe_die(self, kind: str) -> None:
        if self._log is not None and self._faults.strikes(kind):
            self._die()

    def _die(self) -> None:
        """Crash: lose everything but the log, and restart later, possibly with a skewed clock."""
        self._life += 1
        self.down_until_s = self._kernel.now + self._faults.between(0.5, 5.0)
        if self._faults.strikes("clock skew"):
            self._skew_s += self._faults.between(-20.0, 20.0)
        self._kernel.call(self.down_until_s, self._boot)
        raise _Died

    def _boot(self, _: None) -> None:
        """Restart: rebuild the coordinator from the log."""
        if self._log is not None:
            self.up_s = self._kernel.now
            self.coordinator = Coordinator.replay(self._log.events(), self._rules)
            self._begin(None)

    def _begin(self, _: None) -> None:
        """Start an epoch, apply the operator's settings, and repeat pending planning requests."""
        now_s, queue = self.clock_s, self._queue
        try:
            self._commit(EpochBegan(now_s=now_s, epoch=self.coordinator.epoch + 1))
            self._commit(
                PoolSet(
                    now_s=now_s,
                    links=queue.links,
                    objective=queue.objective,
                    patience_s=queue.patience_s,
                )
            )
            self._act(self.coordinator.handle(Restarted(now_s=now_s)))
        except _Died:
            return
