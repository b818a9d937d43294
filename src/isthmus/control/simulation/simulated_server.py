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
from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.simulation.faults.fault_injector import FaultInjector
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
    SiteChecked,
)
from isthmus.core.errors import AuthError, UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.plan import PlanSet
from isthmus.core.pool import Link
from isthmus.sim import Kernel


class DurableLog(Protocol):
    """The server's log, which survives crashes."""

    def append(self, events: Sequence[Event]) -> None:
        """Append events; they are on disk when this returns."""

    def append_torn(self, events: Sequence[Event], rng: random.Random) -> None:
        """Simulate a crash during an append: all events are stored or none."""

    def events(self) -> Iterable[Event]:
        """Return the stored events in order."""


class MemoryLog:
    """A log in memory."""

    def __init__(self) -> None:
        self.stored: list[Event] = []

    def append(self, events: Sequence[Event]) -> None:
        """Append events; see `DurableLog`."""
        self.stored.extend(events)

    def append_torn(self, events: Sequence[Event], rng: random.Random) -> None:
        """Store all events or none; see `DurableLog`."""
        self.stored.extend(events if rng.random() < 0.5 else ())

    def events(self) -> Iterable[Event]:
        """Return the stored events; see `DurableLog`."""
        return tuple(self.stored)


class _ServerCrashed(Exception):  # noqa: N818 - control flow, not an error
    """The server's process has crashed."""


@dataclass(frozen=True, kw_only=True)
class QueueConfig:
    """The operator's links and queue settings; see `PoolSet`."""

    links: tuple[Link, ...] = ()
    objective: Objective = "arrival"
    # Half-life of the usage of users (`FairShare`); 0: the queue is by arrival.
    half_life_s: float = 0.0
    patience_s: float = 3600.0


class SimulatedServer:
    """The server on `kernel`'s clock, with the operator's settings `queue_config`.

    Workers of sites end themselves `run_lease_s` after the last contact (0: never). `make_plans` answers planning
    requests, `planning_delay_s` after they are made. Without a `log` the server never crashes. `on_job_changed` is
    called with the id of every changed job, `check_invariants` with the server and its time after every event.
    `up_since_s` is when it last started, the attributes `decision_wall_s` and `planning_wall_s` are wall-clock seconds
    spent in the coordinator and in the planner, `event_counts` counts events
    by kind.
    """

    def __init__(
        self,
        kernel: Kernel,
        make_plans: Callable[[MakePlans], PlanSet],
        *,
        queue_config: QueueConfig,
        rules: CoordinatorConfig | None = None,
        planning_delay_s: float = 0.01,
        log: DurableLog | None = None,
        faults: FaultInjector | None = None,
        on_job_changed: Callable[[str], None] = lambda _: None,
        check_invariants: Callable[[SimulatedServer, float], None] | None = None,
        run_lease_s: float = 0.0,
    ) -> None:
        self._run_lease_s = run_lease_s
        self._kernel, self._make_plans, self._rules, self._planning_delay_s = (
            kernel,
            make_plans,
            rules,
            planning_delay_s,
        )
        self._log, self._faults, self._on_job_changed, self._check_invariants = (
            log,
            faults or FaultInjector(),
            on_job_changed,
            check_invariants,
        )
        self.down_until_s, self.up_since_s, self._skew_s, self._incarnation = 0.0, 0.0, 0.0, 0
        self.decision_wall_s = self.planning_wall_s = 0.0
        self.event_counts: Counter[str] = Counter()
        self.coordinator = Coordinator(rules)
        self._queue_config = queue_config
        kernel.call_at(kernel.now_s, self._begin_epoch)

    @property
    def clock_s(self) -> float:
        """The time by the server's clock, which may be skewed."""
        return self._kernel.now_s + self._skew_s

    @property
    def is_down(self) -> bool:
        """Whether the server is down."""
        return self._kernel.now_s < self.down_until_s

    def submit_event(self, make_event: Callable[[float], Event]) -> None:
        """Append a user's event, made with the server's time.

        Raises `UnavailableError` if the server does not answer; the event may be appended or not.
        """
        if self.is_down:
            raise UnavailableError("no answer from the server")
        try:
            self._commit(make_event(self.clock_s))
            self._maybe_crash("server dies before it answers")
        except _ServerCrashed:
            raise UnavailableError("no answer from the server") from None

    def sync(self, report: AgentReport) -> AgentOrders | None:
        """Apply an agent's report and return its orders, None if the server does not answer."""
        if self.is_down:
            return None
        name = report.cluster.name
        try:
            for answer in report.preflights:
                self._commit(SiteChecked(now_s=self.clock_s, cluster=name, answer=answer))
            self._commit(AgentReported.from_report(report, self.clock_s))
            coordinator, began_s = self.coordinator, time.perf_counter()
            coordinator.record_report(name, self.clock_s, report, steady_s=self._kernel.now_s)
            orders = AgentOrders(
                fence=coordinator.epoch,
                parts=coordinator.orders(name),
                queue=coordinator.site_queue(name),
                preflights=coordinator.preflight_orders(name),
                run_lease_s=self._run_lease_s,
            )
            self.decision_wall_s += time.perf_counter() - began_s
            self._maybe_crash("server dies before it answers")
        except _ServerCrashed:
            return None
        except (AuthError, UnavailableError):
            return None
        return orders

    def tick(self, reachable: Iterable[str]) -> None:
        """Record contact with the `reachable` sites and append the events that are due."""
        if self.is_down:
            return
        now_s = self.clock_s
        for name in reachable:
            self.coordinator.record_report(name, now_s, steady_s=self._kernel.now_s)
        try:
            began_s = time.perf_counter()
            due = self.coordinator.due_events(now_s, self._kernel.now_s)
            self.decision_wall_s += time.perf_counter() - began_s
            for event in due:
                self._commit(event)
        except _ServerCrashed:
            return

    def _commit(self, event: Event) -> None:
        # Step 1: admit the event.
        began_s = time.perf_counter()
        admitted = self.coordinator.admit(event)
        self.decision_wall_s += time.perf_counter() - began_s
        if not admitted:
            return
        # Step 2: append it.
        self.event_counts[event.kind] += 1
        self._maybe_crash("server dies before the append")
        if self._log is not None:
            if self._faults.should_inject("server dies between write and flush"):
                self._log.append_torn([event], self._faults.rng)
                self._crash()
            self._log.append([event])
        self._maybe_crash("server dies between append and handle")
        # Step 3: handle it and execute the instructions.
        began_s = time.perf_counter()
        instructions = self.coordinator.handle(event)
        self.decision_wall_s += time.perf_counter() - began_s
        self._execute(instructions)
        if self._check_invariants is not None:
            self._check_invariants(self, self.clock_s)

    def _execute(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, MakePlans):
                at_s = self._kernel.now_s + self._planning_delay_s
                self._kernel.call_at(at_s, self._finish_planning, (self._incarnation, instruction))
            elif isinstance(instruction, JobChanged):
                self._on_job_changed(instruction.job_id)

    def _finish_planning(self, asked: tuple[int, MakePlans]) -> None:
        life, request = asked
        if life != self._incarnation or self.is_down:
            return
        began_s = time.perf_counter()
        plans = self._make_plans(request)
        self.planning_wall_s += time.perf_counter() - began_s
        event = PlansMade(now_s=self.clock_s, job_id=request.job_id, round=request.round, plans=plans)
        try:
            self._commit(event)
        except _ServerCrashed:
            return

    def _maybe_crash(self, kind: str) -> None:
        if self._log is not None and self._faults.should_inject(kind):
            self._crash()

    def _crash(self) -> None:
        """Crash: lose everything but the log, and restart later, possibly with a skewed clock."""
        self._incarnation += 1
        self.down_until_s = self._kernel.now_s + self._faults.draw_uniform(0.5, 5.0)
        if self._faults.should_inject("clock skew"):
            self._skew_s += self._faults.draw_uniform(-20.0, 20.0)
        self._kernel.call_at(self.down_until_s, self._restart)
        raise _ServerCrashed

    def _restart(self, _: None) -> None:
        """Restart: rebuild the coordinator from the log."""
        if self._log is not None:
            self.up_since_s = self._kernel.now_s
            self.coordinator = Coordinator.replay(self._log.events(), self._rules)
            self._begin_epoch(None)

    def _begin_epoch(self, _: None) -> None:
        """Start an epoch, apply the operator's settings, and repeat pending planning requests."""
        now_s, queue = self.clock_s, self._queue_config
        try:
            self._commit(EpochBegan(now_s=now_s, epoch=self.coordinator.epoch + 1))
            self._commit(
                PoolSet(
                    now_s=now_s,
                    links=queue.links,
                    objective=queue.objective,
                    patience_s=queue.patience_s,
                    planner_turns=True,
                    needs_free_chips=True,
                    half_life_s=queue.half_life_s,
                    share_by_tree=True,
                )
            )
            self._execute(self.coordinator.handle(Restarted(now_s=now_s, steady_s=self._kernel.now_s)))
        except _ServerCrashed:
            return
