"""A pool in virtual time for tests: the real coordinator and the real agents' machines, a world that fails.

Everything that happens follows from one seed. A process may die at a kill point: the server before,
in the middle of and after an append, and before its reply; an agent before it saves its table, before and
between its acts. What dies loses its memory and keeps its disk; workers outlive their agent.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from isthmus.control.coordinator.coordinator import Coordinator, CoordinatorConfig
from isthmus.control.simulation.simulated_server import DurableLog
from isthmus.control.state.events import (
    AgentReported,
    Event,
    JobCancelled,
    JobDeleted,
    JobSubmitted,
    MakePlans,
    PlanChosen,
    PlansMade,
    Restarted,
)
from isthmus.control.state.invariants import violations
from isthmus.control.state.job_records import TERMINAL_STATES
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport, WorkerAddress
from isthmus.core.views.api_views import Submission
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine import SiteMachine
from isthmus.site.machine_events import (
    ObservedWorker,
    OrdersReceived,
    SiteInstruction,
    StartWorker,
    StopWorker,
    WorkersObserved,
    WriteRankMap,
)
from isthmus.site.machine_events import SiteEvent as AgentEvent
from isthmus.site.parts import SitePart
from tests.control.samples import cluster, plan_for
from tests.control.world import Chaos, World

STEP_S = 0.5
RULES = CoordinatorConfig(
    reservation_timeout_s=6, start_timeout_s=20, lease_s=5, agent_timeout_s=3, retry_s=1, max_retry_s=8
)


class Killed(Exception):  # noqa: N818 - it is what happens, not an error
    """The process in whose code this is raised is gone."""


class Away(Exception):  # noqa: N818
    """No answer."""


class Server:
    """The shell around the coordinator, in as few lines as it takes."""

    def __init__(self, disk: DurableLog, chaos: Chaos, needs: dict[str, int]) -> None:
        self.disk, self.chaos, self.needs = disk, chaos, needs
        self.acknowledged: set[str] = set()
        self.boot(0.0)

    def boot(self, now_s: float) -> None:
        self.coordinator = Coordinator.replay(self.disk.events(), RULES)
        self.down_until_s, self.pending = 0.0, list[tuple[float, MakePlans]]()
        self._act(self.coordinator.handle(Restarted(now_s=now_s)), now_s)
        self._check(now_s)

    def die(self, now_s: float) -> None:
        self.down_until_s = now_s + self.chaos.rng.uniform(STEP_S, 5)

    def step(self, now_s: float) -> None:
        """Restart, answer the planner's requests, take in what is due."""
        if self.down_until_s:
            if now_s < self.down_until_s:
                return
            self.boot(now_s)
        try:
            ready = [(at, ask) for at, ask in self.pending if at <= now_s]
            self.pending = [(at, ask) for at, ask in self.pending if at > now_s]
            for _, ask in ready:
                plans = plan_for(ask, self.needs[ask.submission.key])
                self._commit(PlansMade(now_s=now_s, job_id=ask.job_id, round=ask.round, plans=plans))
            for event in self.coordinator.due_events(now_s):
                self._commit(event)
            self._check(now_s, grace_s=STEP_S)
        except Killed:
            self.die(now_s)

    def tell(self, event: Event) -> None:
        """Let a user's event in; raise `Away` where the server dies before it has answered."""
        self._alive(event.now_s)
        try:
            self._commit(event)
            self._maybe_die("server: before the answer")
        except Killed:
            self.die(event.now_s)
            raise Away from None

    def exchange(self, report: AgentReport, now_s: float) -> AgentOrders:
        """Take a report in and answer with orders; raise `Away` where the server is or goes away."""
        self._alive(now_s)
        try:
            self._commit(AgentReported.from_report(report, now_s))
            self.coordinator.record_report(report.cluster.name, now_s)
            name = report.cluster.name
            parts, queue = self.coordinator.orders(name), self.coordinator.site_queue(name)
            orders = AgentOrders(parts=parts, queue=queue)
            self._maybe_die("server: before the orders go out")
        except Killed:
            self.die(now_s)
            raise Away from None
        return orders

    def _alive(self, now_s: float) -> None:
        if self.down_until_s:
            raise Away

    def _commit(self, event: Event) -> None:
        if not self.coordinator.admit(event):
            return
        self._maybe_die("server: before the append")
        if self.chaos.point("server: between write and flush"):
            self.disk.append_torn([event], self.chaos.rng)
            raise Killed
        self.disk.append([event])
        self._maybe_die("server: between append and handle")
        self._act(self.coordinator.handle(event), event.now_s)
        self._check(event.now_s)

    def _act(self, instructions: Iterable[object], now_s: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, MakePlans):
                self.pending.append((now_s + self.chaos.rng.uniform(0, 1), instruction))

    def _check(self, now_s: float, grace_s: float = 1e9) -> None:
        found = violations(self.coordinator.state, now_s, grace_s=grace_s, job_ids=self.acknowledged)
        assert found == []

    def _maybe_die(self, name: str) -> None:
        if self.chaos.point(name):
            raise Killed


class Site:
    """One agent around its machine: saves, acts, reports; and the network between it and the server."""

    def __init__(self, name: str, chips: int, world: World) -> None:
        self.cluster, self.world, self.chaos = cluster(name, chips), world, world.chaos
        self.chips, self.table, self.lives = chips, list[SitePart](), 0
        self.late: list[tuple[float, AgentReport]] = []
        self.boot(0.0)

    def boot(self, now_s: float) -> None:
        self.lives += 1
        self.down_until_s = 0.0
        devices = DeviceIdAllocator({"g": [str(device) for device in range(self.chips)]})
        self.machine = SiteMachine(self.cluster.name, devices, _copy(self.table), now_s=now_s)

    def step(self, server: Server, now_s: float) -> None:
        """Look at the workers, report, carry the orders out; late reports arrive whatever the agent does."""
        arrived = [report for at, report in self.late if at <= now_s]
        self.late = [(at, report) for at, report in self.late if at > now_s]
        for report in arrived:
            self._send(server, report, now_s)
        if self.down_until_s > now_s:
            return
        if self.down_until_s:
            self.boot(now_s)
        try:
            self._live(server, now_s)
        except Killed:
            self.down_until_s = now_s + self.chaos.rng.uniform(STEP_S, 7)
        running = self.world.running(self.cluster.name)
        assert running <= self.chips, f"{running} workers on {self.chips} cards"

    def _live(self, server: Server, now_s: float) -> None:
        self._apply(WorkersObserved(now_s=now_s, workers=tuple(self._look(now_s))))
        self.table = _copy(self.machine.parts.values())
        report = AgentReport(
            cluster=self.cluster,
            incarnation=f"{self.cluster.name}-{self.lives}",
            free_chips=self.machine.free_chips(),
            parts=self.machine.observed_parts(),
        )
        if self.chaos.hit(0.1):
            self.late.append((now_s + self.chaos.rng.uniform(0, 20), report))
        if self.chaos.hit(0.1):
            return
        orders = self._send(server, report, now_s)
        if orders is not None and not self.chaos.hit(0.1):
            self._apply(OrdersReceived(now_s=now_s, orders=orders))

    def _send(self, server: Server, report: AgentReport, now_s: float) -> AgentOrders | None:
        try:
            return server.exchange(report, now_s)
        except Away:
            return None

    def _apply(self, event: AgentEvent) -> None:
        instructions = self.machine.handle(event)
        if instructions and self.chaos.point("agent: before it saves"):
            raise Killed
        self.table = _copy(self.machine.parts.values())
        for instruction in instructions:
            if self.chaos.point("agent: between saving and acting"):
                raise Killed
            self._do(instruction)

    def _do(self, instruction: SiteInstruction) -> None:
        name, part = self.cluster.name, instruction.part
        match instruction:
            case StartWorker(rank=rank):
                self.world.start(name, part.job, part.attempt, rank)
            case StopWorker(rank=rank, force=force):
                self.world.stop(name, part.job, part.attempt, rank, force=force)
            case WriteRankMap():
                for rank in part.workers:
                    self.world.give_ranks(name, part.job, part.attempt, rank)

    def _look(self, now_s: float) -> Iterator[ObservedWorker]:
        for part in self.machine.parts.values():
            for rank, held in part.workers.items():
                if held.live:
                    yield self._look_at(part, rank, now_s)

    def _look_at(self, part: SitePart, rank: int, now_s: float) -> ObservedWorker:
        worker = self.world.worker(self.cluster.name, part.job, part.attempt, rank)
        address = WorkerAddress(rank=rank, cluster=self.cluster.name, host="h", port=rank + 1)
        here = worker.state == "running" and worker.checkin_s <= now_s
        return ObservedWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state=worker.state,  # type: ignore[arg-type]
            exit_status=worker.exit_status,
            address=address if here else None,
        )


def _copy(parts: Iterable[SitePart]) -> list[SitePart]:
    """Copy a part table as its file would keep it."""
    return [replace(p, workers={rank: replace(w) for rank, w in p.workers.items()}) for p in parts]


@dataclass
class User:
    """Who wants one job: submits until it is acknowledged, then chooses, cancels and deletes as told."""

    wish: Submission
    at_s: float
    cancel_at_s: float | None = None
    deletes: bool = False
    tries: int = 0
    job_id: str | None = None
    asked_to_cancel: bool = False

    def step(self, server: Server, now_s: float, rng: random.Random) -> None:
        try:
            self._act(server, now_s, rng)
        except (Away, ConflictError):
            return

    def _act(self, server: Server, now_s: float, rng: random.Random) -> None:
        if now_s < self.at_s or server.down_until_s:
            return
        if self.job_id is None:
            self.tries += 1
            name = f"{self.wish.key}-{self.tries}"
            server.tell(JobSubmitted(now_s=now_s, job_id=name, user="u", submission=self.wish))
            self.job_id = server.coordinator.job_id_of_key("u", self.wish.key)
            assert self.job_id is not None
            server.acknowledged.add(self.job_id)
            return
        if self.job_id not in server.coordinator.state.jobs:
            return
        job = server.coordinator.job_view(self.job_id)
        if self.cancel_at_s is not None and now_s >= self.cancel_at_s and job.state not in TERMINAL_STATES:
            self.asked_to_cancel = True
            server.tell(JobCancelled(now_s=now_s, job_id=self.job_id))
        elif job.state == "choosing" and job.plans is not None:
            chosen = rng.choice(job.plans.plans).id
            server.tell(PlanChosen(now_s=now_s, job_id=self.job_id, plan_id=chosen))
        elif job.state in TERMINAL_STATES and self.deletes and not job_held(server, self.job_id):
            server.acknowledged.discard(self.job_id)
            server.tell(JobDeleted(now_s=now_s, job_id=self.job_id))


def job_held(server: Server, job_id: str) -> bool:
    """Tell whether some site has not yet confirmed that nothing is left of the job."""
    return bool(server.coordinator.state.jobs[job_id].unreleased_parts())
