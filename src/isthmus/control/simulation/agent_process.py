"""`AgentProcess`: a simulated agent that drives a `SiteMachine`, and the processes of its site.

It reports when something has changed or a report is due, executes the orders that it receives, and observes
its processes. A crash loses its memory but keeps the part table; processes survive it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.fault_rates import Faults
from isthmus.control.simulation.faults.lies import lie
from isthmus.control.simulation.local_scheduler import LocalScheduler, Work
from isthmus.control.simulation.observed_work import (
    observe_absent,
    observe_exited,
    observe_running,
    observe_saved,
)
from isthmus.control.simulation.owner_hours import is_open_at, next_change_s
from isthmus.control.simulation.run_progress import Runs
from isthmus.control.simulation.simulated_server import SimulatedServer
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport, Protection
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster
from isthmus.sim.kernel import Kernel, Steps
from isthmus.site import (
    UNSAVED_STEP_S,
    DeviceCounts,
    Event,
    FetchFiles,
    FetchObserved,
    HoursObserved,
    Instruction,
    LocalJob,
    LocalJobSubmitted,
    LocalJobWithdrawn,
    ObservedWorker,
    OrdersReceived,
    PartKey,
    RequestCheckpoint,
    SiteMachine,
    SitePart,
    StartWorker,
    StopWorker,
    WorkersObserved,
    WriteRankMap,
)

_LATE_S = 1e-3
"""Timers fire this much late, to be past the due time despite floating-point rounding."""

_RENEW_S = 2.0
"""Interval of reports that renew leases on devices."""


class AgentProcess:
    """A simulated agent. Unless it has `joined` the pool it sends no reports.

    `local` is called with (site, job, status) when a local job starts (None), is preempted (-1) or ends (exit
    status), `processes` with (site, part, started) when processes of a part start or end. `lies`: some
    reports are false; `slow`: messages are delayed.
    """

    def __init__(
        self,
        kernel: Kernel,
        cluster: Cluster,
        server: SimulatedServer,
        runs: Runs,
        delays: Delays,
        faults: Faults,
        local: Callable[[str, str, int | None], None] = lambda *_: None,
        *,
        policy: OwnerPolicy,
        processes: Callable[[str, PartKey, bool], None] = lambda *_: None,
        joined: bool = True,
    ) -> None:
        self._kernel, self.cluster, self._server, self._runs = kernel, cluster, server, runs
        self._delays, self._faults, self._local = delays, faults, local
        self._processes = processes
        self.name = cluster.name
        self.devices = DeviceCounts({group.name: group.chips for group in cluster.node_groups})
        self.machine = SiteMachine(
            cluster.name,
            self.devices,
            priorities=cluster.priorities,
            policy=policy,
            fetches=delays.fetch_s > 0,
            silence_timeout_s=math.inf,
        )
        self.scheduler = LocalScheduler(faults)
        self.lies = faults.strikes("lying owner")
        self.slow = faults.strikes("slow owner")
        self.dead_until_s = self.cut_until_s = 0.0
        self._life, self._exchanges, self._talking = 1, 0, False
        self._visit_at_s: float | None = None
        self._wake_at_s: float | None = None
        self._weigh_at_s = 0.0
        self._told = -1
        self._joined = joined
        self.poke(0.0)
        self._policy = policy
        if policy.hours:
            kernel.start(self._keep_hours())

    @property
    def parts(self) -> dict[PartKey, SitePart]:
        """The site's parts by key."""
        return self.machine.parts

    @property
    def idle(self) -> bool:
        """Whether the site has no part of the pool."""
        return all(part.local for part in self.parts.values())

    @property
    def reachable(self) -> bool:
        """Whether the agent is up and connected."""
        now_s = self._kernel.now
        return now_s >= self.dead_until_s and now_s >= self.cut_until_s

    def poke(self, pause_s: float) -> None:
        """Schedule a report in `pause_s`, unless an earlier one is scheduled."""
        at_s = self._kernel.now + pause_s
        if self._joined and (self._visit_at_s is None or at_s < self._visit_at_s):
            self._visit_at_s = at_s
            self._kernel.call(at_s, self._visit, at_s)

    def submit(self, job: LocalJob) -> None:
        """Submit a local job."""
        self.handle(LocalJobSubmitted(now_s=self._kernel.now, job=job))

    def withdraw(self, name: str) -> None:
        """Withdraw a local job."""
        self.handle(LocalJobWithdrawn(now_s=self._kernel.now, name=name))

    def part_ended(self, key: PartKey, status: int) -> None:
        """End the processes of a part with an exit status."""
        if self._end(key, status):
            self._see(key)

    def part_saved(self, key: PartKey, checkpoint: Protection) -> None:
        """Observe that every rank of a part has verified a checkpoint."""
        part = self.parts.get(key)
        if self._kernel.now >= self.dead_until_s and part is not None and part.live:
            self._observe(observe_saved(part, checkpoint, self._runs.unsaved_s(*key)))

    def die(self) -> None:
        """Crash: the agent's memory is lost, its table and workers remain; it restarts later."""
        self._life += 1
        self._talking = False
        self.dead_until_s = self._kernel.now + self._faults.between(0.5, 8.0)
        self.scheduler.forget_all()
        self._kernel.call(self.dead_until_s, self._boot, self._life)

    def _boot(self, life: int) -> None:
        if life != self._life:
            return
        self._do(self.machine.restart(self._kernel.now))
        self._look_at_hours()
        for key in list(self.parts):
            self._see(key)
        self._told = -1
        self.poke(0.0)

    def _visit(self, at_s: float) -> None:
        if at_s != self._visit_at_s:
            return
        self._visit_at_s = None
        if self._kernel.now < self.dead_until_s:
            return
        if self._talking:
            self.poke(self._delays.quick_s)
            return
        self._talking = True
        self._exchanges += 1
        if self._kernel.now >= self._weigh_at_s:
            self._weigh_at_s = self._kernel.now + UNSAVED_STEP_S
            self._observe(
                one
                for part in self.parts.values()
                if part.state == "running" and not part.local and _has_checked_in(part)
                for one in observe_running(part, self.name, self._runs.unsaved_s(*part.key))
            )
        self._told = self.machine.site.num_changes
        report = AgentReport(
            cluster=self.cluster,
            incarnation=f"{self.name}-{self._life}",
            free_chips=self.machine.free_chips(),
            parts=self.machine.observed(),
            queue=self.machine.queue(),
            local_jobs=self.machine.local_jobs(),
        )
        if self.lies and self._faults.on:
            report = lie(report, self._faults)
        self._send(report)

    def _send(self, report: AgentReport) -> None:
        """Send a report, which may be lost, duplicated or delayed."""
        faults, travel_s = self._faults, self._travel_s()
        ticket = self._life, self._exchanges
        self._kernel.call(self._kernel.now + self._delays.retry_s + 2 * travel_s, self._give_up, ticket)
        if faults.strikes("partition"):
            self.cut_until_s = self._kernel.now + faults.between(1.0, 20.0)
        if faults.strikes("late report"):
            self._kernel.call(self._kernel.now + faults.between(1.0, 20.0), self._arrive_again, report)
        if faults.strikes("lost report"):
            return
        self._kernel.call(self._kernel.now + travel_s, self._arrive, (report, ticket, travel_s))
        if faults.strikes("doubled report"):
            self._kernel.call(self._kernel.now + 2 * travel_s, self._arrive_again, report)

    def _travel_s(self) -> float:
        slow = self.slow and self._faults.on
        return self._delays.network_s * (self._faults.between(5, 60) if slow else 1.0)

    def _arrive_again(self, report: AgentReport) -> None:
        """Deliver a duplicate or delayed report; its answer is dropped."""
        if self._kernel.now >= self.cut_until_s:
            self._server.exchange(report)

    def _arrive(self, sent: tuple[AgentReport, tuple[int, int], float]) -> None:
        report, ticket, travel_s = sent
        if self._kernel.now < self.cut_until_s:
            return
        orders = self._server.exchange(report)
        if orders is not None and not self._faults.strikes("lost reply"):
            self._kernel.call(self._kernel.now + travel_s, self._answered, (orders, ticket))

    def _give_up(self, ticket: tuple[int, int]) -> None:
        """Retry if the exchange is still unanswered."""
        if self._talking and ticket == (self._life, self._exchanges):
            self._talking = False
            self.poke(0.0)

    def _answered(self, answer: tuple[AgentOrders, tuple[int, int]]) -> None:
        orders, ticket = answer
        if ticket != (self._life, self._exchanges) or self._kernel.now < self.dead_until_s:
            return
        self._talking = False
        if self._faults.strikes("agent dies before it saves"):
            self.die()
            return
        instructions = self.machine.handle(OrdersReceived(now_s=self._kernel.now, orders=orders))
        if instructions and self._faults.strikes("agent dies between saving and acting"):
            self.die()
            return
        self._do(instructions)
        site = self.machine.site
        if any(site.is_leased(part) for part in site.time_dependent.values()):
            self.poke(_RENEW_S)
        elif self._delays.beat_s < math.inf:
            self.poke(self._delays.beat_s)

    def handle(self, event: Event) -> None:
        """Pass an event to the site machine and execute its instructions."""
        self._do(self.machine.handle(event))

    def _observe(self, workers: Iterable[ObservedWorker]) -> None:
        self.handle(WorkersObserved(now_s=self._kernel.now, workers=tuple(workers)))

    def _do(self, instructions: Iterable[Instruction]) -> None:
        """Execute instructions; schedule a report if anything changed, and the machine's next timer."""
        stopped: set[tuple[PartKey, bool]] = set()
        for instruction in instructions:
            match instruction:
                case StartWorker(part=part):
                    self._start(part)
                case StopWorker(part=part, force=force) if (part.key, force) not in stopped:
                    stopped.add((part.key, force))
                    stop_s, status = (0.0, 137) if force else (self._delays.stop_s, 143)
                    work = self.scheduler.find(part.key) or self.scheduler.bar(part.key)
                    self._kernel.call(self._kernel.now + stop_s, self._stop, (work, status))
                case WriteRankMap(part=part) if part.plan is not None:
                    self._runs.ready(self.name, part.job, part.attempt, part.plan.clusters)
                case RequestCheckpoint(part=part):
                    self._runs.protect(self.name, part.job, part.attempt)
                case FetchFiles(part=part):
                    self._kernel.call(self._kernel.now + self._delays.fetch_s, self._fetched, part.job)
        if self.machine.site.num_changes != self._told:
            self.poke(self._delays.quick_s)
        next_s = self.machine.next_s
        if next_s < math.inf and (self._wake_at_s is None or next_s < self._wake_at_s):
            self._wake_at_s = max(next_s, self._kernel.now) + _LATE_S
            self._kernel.call(self._wake_at_s, self._pass_time, self._wake_at_s)

    def _pass_time(self, at_s: float) -> None:
        if at_s != self._wake_at_s:
            return
        self._wake_at_s = None
        if self._kernel.now >= self.dead_until_s:
            self._observe(())

    def _fetched(self, job: str) -> None:
        if self._kernel.now >= self.dead_until_s:
            self.handle(FetchObserved(now_s=self._kernel.now, job=job, words="copied", here=True))

    def _keep_hours(self) -> Steps:
        """Observe the owner's hours whenever they may begin or end."""
        self._look_at_hours()
        while (at_s := next_change_s(self._policy, self._kernel.now)) is not None:
            yield at_s
            self._look_at_hours()

    def _look_at_hours(self) -> None:
        now_s = self._kernel.now
        if now_s >= self.dead_until_s:
            self.handle(HoursObserved(now_s=now_s, is_open=is_open_at(self._policy, now_s)))

    def _start(self, part: SitePart) -> None:
        key = part.key
        check_in_s = self._kernel.now + self._delays.check_in_s
        if not self.scheduler.start(key, check_in_s):
            return
        self._processes(self.name, key, True)
        if part.local:
            self._local(self.name, part.job, None)
        else:
            self._kernel.call(check_in_s, self._see, key)

    def _stop(self, asked: tuple[Work, int]) -> None:
        """Stop a scheduler job, unless another one has taken its name since."""
        work, status = asked
        key = work.key
        if self.scheduler.find(key) is work:
            if self._end(key, status) and key[1]:
                self._runs.lost(self.name, key[0], key[1])
            self._see(key)

    def _end(self, key: PartKey, status: int) -> bool:
        ended = self.scheduler.end(key, status)
        if ended:
            self._processes(self.name, key, False)
        return ended

    def fail(self, key: PartKey) -> None:
        """Fail a part because of a node failure."""
        work = self.scheduler.find(key)
        if work is not None:
            self._stop((work, 1))

    def _see(self, key: PartKey) -> None:
        """Observe the processes of a part, unless the agent is down."""
        part, work = self.parts.get(key), self.scheduler.find(key)
        if self._kernel.now < self.dead_until_s or part is None or not part.live:
            return
        if work is None:
            self._observe(observe_absent(part))
        elif work.state == "running":
            if not part.local and self._kernel.now >= work.checked_in_s:
                self._observe(observe_running(part, self.name, self._runs.unsaved_s(*key)))
        elif part.local:
            self.scheduler.forget(key)
            self._local(self.name, key[0], -1 if part.requeue else work.status)
            self._observe(observe_exited(part, work.status))
        else:
            self._observe(observe_exited(part, work.status))


def _has_checked_in(part: SitePart) -> bool:
    return all(worker.address is not None for worker in part.workers.values())
