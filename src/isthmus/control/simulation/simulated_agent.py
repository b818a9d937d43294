"""`SimulatedAgent`: a simulated agent that drives a `SiteMachine`, and the processes of its site.

It reports when something has changed or a report is due, executes the orders that it receives, and observes
its processes. A crash loses its memory but keeps the part table; processes survive it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable

from isthmus.control.simulation.delays import Delays
from isthmus.control.simulation.faults.false_reports import falsify_report
from isthmus.control.simulation.faults.fault_injector import FaultInjector
from isthmus.control.simulation.owner_hours import is_open_at, may_move_at, next_change_s
from isthmus.control.simulation.simulated_runs import SimulatedRuns
from isthmus.control.simulation.simulated_scheduler import SchedulerJob, SimulatedScheduler
from isthmus.control.simulation.simulated_server import SimulatedServer
from isthmus.control.simulation.worker_observations import (
    observe_absent,
    observe_exited,
    observe_running,
    observe_saved,
)
from isthmus.core.messages.agent_messages import AgentIdentity, AgentOrders, AgentReport, VerifiedCheckpoint
from isthmus.core.messages.preflight import CheckResult, CheckStatus, PreflightAnswer, PreflightOrder
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster
from isthmus.sim import Kernel, ProcessGenerator
from isthmus.site import (
    UNSAVED_STEP_S,
    FetchFiles,
    FetchObserved,
    HoursObserved,
    LocalJob,
    LocalJobSubmitted,
    LocalJobWithdrawn,
    ObservedWorker,
    OrdersReceived,
    PartKey,
    RenewRunLease,
    RequestCheckpoint,
    SiteEvent,
    SiteInstruction,
    SiteMachine,
    SitePart,
    StartWorker,
    StopWorker,
    WorkersObserved,
    WriteRankMap,
    make_allocator,
)

_MACHINE = hashlib.sha256(b"simulated").hexdigest()
_TIMER_SLACK_S = 1e-3
"""Timers fire this much late, to be past the due time despite floating-point rounding."""

_LEASE_RENEWAL_S = 2.0
"""Interval of reports that renew leases on devices."""


class SimulatedAgent:
    """A simulated agent. Unless it has `joined` the pool it sends no reports.

    `on_local_job` is called with (site, job, status) when a local job starts (None), is preempted (-1) or ends (exit
    status), `on_process` with (site, part, started) when processes of a part start or end. `reports_falsely`: some
    reports are false; `is_slow`: messages are delayed.
    """

    def __init__(
        self,
        kernel: Kernel,
        cluster: Cluster,
        server: SimulatedServer,
        runs: SimulatedRuns,
        delays: Delays,
        faults: FaultInjector,
        on_local_job: Callable[[str, str, int | None], None] = lambda *_: None,
        *,
        policy: OwnerPolicy,
        on_process: Callable[[str, PartKey, bool], None] = lambda *_: None,
        joined: bool = True,
    ) -> None:
        self._kernel, self.cluster, self._server, self._runs = kernel, cluster, server, runs
        self._delays, self._faults, self._on_local_job = delays, faults, on_local_job
        self._on_process = on_process
        self.name = cluster.name
        self.devices = make_allocator(cluster)
        self.machine = SiteMachine(
            cluster.name,
            self.devices,
            priorities=cluster.priorities,
            policy=policy,
            has_own_storage=delays.file_fetch_s > 0,
            silence_timeout_s=math.inf,
        )
        self.scheduler = SimulatedScheduler(faults)
        self.reports_falsely = faults.should_inject("lying owner")
        self.is_slow = faults.should_inject("slow owner")
        self.down_until_s = self.partitioned_until_s = 0.0
        self._key, self._sent_s = hashlib.sha256(self.name.encode()).hexdigest(), 0.0
        self._incarnation, self._num_syncs, self._sync_pending = 1, 0, False
        self._report_at_s: float | None = None
        self._wake_at_s: float | None = None
        self._next_unsaved_report_s = 0.0
        self._preflights: dict[tuple[str, int, str], PreflightAnswer | None] = {}
        self._reported_changes = -1
        self._joined = joined
        self.schedule_report(0.0)
        self._policy = policy
        if policy.hours or policy.moves.hours:
            kernel.start(self._watch_hours())

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
        now_s = self._kernel.now_s
        return now_s >= self.down_until_s and now_s >= self.partitioned_until_s

    def schedule_report(self, delay_s: float) -> None:
        """Schedule a report in `delay_s`, unless an earlier one is scheduled."""
        at_s = self._kernel.now_s + delay_s
        if self._joined and (self._report_at_s is None or at_s < self._report_at_s):
            self._report_at_s = at_s
            self._kernel.call_at(at_s, self._report, at_s)

    def submit_local_job(self, job: LocalJob) -> None:
        """Submit a local job."""
        self.handle(LocalJobSubmitted(now_s=self._kernel.now_s, job=job))

    def withdraw_local_job(self, name: str) -> None:
        """Withdraw a local job."""
        self.handle(LocalJobWithdrawn(now_s=self._kernel.now_s, name=name))

    def end_part(self, key: PartKey, status: int) -> None:
        """End the processes of a part with an exit status."""
        if self._end_processes(key, status):
            self._observe_part(key)

    def record_checkpoint(self, key: PartKey, checkpoint: VerifiedCheckpoint) -> None:
        """Observe that every rank of a part has verified a checkpoint."""
        part = self.parts.get(key)
        if self._kernel.now_s >= self.down_until_s and part is not None and part.live:
            self._observe(observe_saved(part, checkpoint, self._runs.unsaved_s(*key)))

    def crash(self) -> None:
        """Crash: the agent's memory is lost, its table and workers remain; it restarts later."""
        self._incarnation += 1
        self._sync_pending = False
        self._preflights.clear()
        self.down_until_s = self._kernel.now_s + self._faults.draw_uniform(0.5, 8.0)
        self.scheduler.forget_ids()
        self._kernel.call_at(self.down_until_s, self._restart, self._incarnation)

    def _restart(self, life: int) -> None:
        if life != self._incarnation:
            return
        self._execute(self.machine.restart(self._kernel.now_s))
        self._observe_hours()
        for key in list(self.parts):
            self._observe_part(key)
        self._reported_changes = -1
        self.schedule_report(0.0)

    def _report(self, at_s: float) -> None:
        if at_s != self._report_at_s:
            return
        self._report_at_s = None
        if self._kernel.now_s < self.down_until_s:
            return
        if self._sync_pending:
            self.schedule_report(self._delays.report_delay_s)
            return
        self._sync_pending = True
        self._num_syncs += 1
        if self._kernel.now_s >= self._next_unsaved_report_s:
            self._next_unsaved_report_s = self._kernel.now_s + UNSAVED_STEP_S
            self._observe(
                one
                for part in self.parts.values()
                if part.state == "running" and not part.local and _has_checked_in(part)
                for one in observe_running(part, self.name, self._runs.unsaved_s(*part.key))
            )
        self._reported_changes = self.machine.site.num_changes
        self._sent_s = self._kernel.now_s
        report = AgentReport(
            clock_s=self._sent_s,
            cluster=self.cluster,
            incarnation=f"{self.name}-{self._incarnation}",
            identity=AgentIdentity(
                key=self._key,
                machine=_MACHINE,
                boot=_MACHINE,
                session=self._incarnation,
                saves=self.machine.site.num_changes,
            ),
            run_lease_s=self.machine.run_lease_s(),
            moves=self.machine.moves(),
            free_chips=self.machine.free_chips(),
            parts=self.machine.observed_parts(),
            queue=self.machine.queue(),
            local_jobs=self.machine.local_jobs(),
            checks=self._delays.preflight_s > 0,
            preflights=tuple(answer for answer in self._preflights.values() if answer is not None),
        )
        if self.reports_falsely and self._faults.enabled:
            report = falsify_report(report, self._faults)
        self._send(report)

    def _send(self, report: AgentReport) -> None:
        """Send a report, which may be lost, duplicated or delayed."""
        faults, travel_s = self._faults, self._message_delay_s()
        ticket = self._incarnation, self._num_syncs
        self._kernel.call_at(self._kernel.now_s + self._delays.retry_delay_s + 2 * travel_s, self._time_out, ticket)
        if faults.should_inject("partition"):
            self.partitioned_until_s = self._kernel.now_s + faults.draw_uniform(1.0, 20.0)
        if faults.should_inject("late report"):
            self._kernel.call_at(self._kernel.now_s + faults.draw_uniform(1.0, 20.0), self._deliver_duplicate, report)
        if faults.should_inject("lost report"):
            return
        self._kernel.call_at(self._kernel.now_s + travel_s, self._deliver, (report, ticket, travel_s))
        if faults.should_inject("doubled report"):
            self._kernel.call_at(self._kernel.now_s + 2 * travel_s, self._deliver_duplicate, report)

    def _message_delay_s(self) -> float:
        slow = self.is_slow and self._faults.enabled
        return self._delays.network_s * (self._faults.draw_uniform(5, 60) if slow else 1.0)

    def _deliver_duplicate(self, report: AgentReport) -> None:
        """Deliver a duplicate or delayed report; its answer is dropped."""
        if self._kernel.now_s >= self.partitioned_until_s:
            self._server.sync(report)

    def _deliver(self, sent: tuple[AgentReport, tuple[int, int], float]) -> None:
        report, ticket, travel_s = sent
        if self._kernel.now_s < self.partitioned_until_s:
            return
        orders = self._server.sync(report)
        if orders is not None and not self._faults.should_inject("lost reply"):
            self._kernel.call_at(self._kernel.now_s + travel_s, self._receive_orders, (orders, ticket))

    def _time_out(self, ticket: tuple[int, int]) -> None:
        """Retry if the exchange is still unanswered."""
        if self._sync_pending and ticket == (self._incarnation, self._num_syncs):
            self._sync_pending = False
            self.schedule_report(0.0)

    def _receive_orders(self, answer: tuple[AgentOrders, tuple[int, int]]) -> None:
        orders, ticket = answer
        if ticket != (self._incarnation, self._num_syncs) or self._kernel.now_s < self.down_until_s:
            return
        self._sync_pending = False
        if self._faults.should_inject("agent dies before it saves"):
            self.crash()
            return
        self._begin_checks(orders.preflights)
        received = OrdersReceived(now_s=self._kernel.now_s, orders=orders, sent_s=self._sent_s)
        instructions = self.machine.handle(received)
        if instructions and self._faults.should_inject("agent dies between saving and acting"):
            self.crash()
            return
        self._execute(instructions)
        site = self.machine.site
        if any(site.is_leased(part) for part in site.time_dependent.values()):
            self.schedule_report(_LEASE_RENEWAL_S)
        elif self._delays.heartbeat_interval_s < math.inf:
            self.schedule_report(self._delays.heartbeat_interval_s)

    def _begin_checks(self, orders: Iterable[PreflightOrder]) -> None:
        """Begin the checks that are new, and drop those that are no longer ordered."""
        listed = {(order.job, order.round, order.phase): order for order in orders}
        self._preflights = {key: answer for key, answer in self._preflights.items() if key in listed}
        for key in [key for key in listed if key not in self._preflights]:
            self._preflights[key] = None
            at_s = self._kernel.now_s + self._delays.preflight_s
            self._kernel.call_at(at_s, self._finish_checks, (self._incarnation, listed[key]))

    def _finish_checks(self, begun: tuple[int, PreflightOrder]) -> None:
        """Answer an order: all checks pass, or one has no result."""
        life, order = begun
        key = order.job, order.round, order.phase
        if life != self._incarnation or key not in self._preflights:
            return
        status: CheckStatus = "unknown" if self._faults.should_inject("check without result") else "passed"
        results = tuple(CheckResult(name=one.name, status=status, peer=one.peer) for one in order.checks)
        self._preflights[key] = PreflightAnswer(
            job=order.job, round=order.round, phase=order.phase, results=results, seconds=self._delays.preflight_s
        )
        self.schedule_report(self._delays.report_delay_s)

    def handle(self, event: SiteEvent) -> None:
        """Pass an event to the site machine and execute its instructions."""
        self._execute(self.machine.handle(event))

    def _observe(self, workers: Iterable[ObservedWorker]) -> None:
        self.handle(WorkersObserved(now_s=self._kernel.now_s, workers=tuple(workers)))

    def _execute(self, instructions: Iterable[SiteInstruction]) -> None:
        """Execute instructions; schedule a report if anything changed, and the machine's next timer."""
        stopped: set[tuple[PartKey, bool]] = set()
        for instruction in instructions:
            match instruction:
                case StartWorker(part=part):
                    self._start_part(part)
                case StopWorker(part=part, force=force) if (part.key, force) not in stopped:
                    stopped.add((part.key, force))
                    stop_s, status = (0.0, 137) if force else (self._delays.stop_s, 143)
                    work = self.scheduler.find(part.key) or self.scheduler.block_start(part.key)
                    self._kernel.call_at(self._kernel.now_s + stop_s, self._stop_processes, (work, status))
                case RenewRunLease(until_s=until_s) if until_s < math.inf:
                    self._kernel.call_at(until_s, self._end_run_lease, until_s)
                case WriteRankMap(part=part) if part.plan is not None:
                    self._runs.deliver_rank_map(self.name, part.job, part.attempt, part.plan.clusters)
                case RequestCheckpoint(part=part):
                    self._runs.request_checkpoint(self.name, part.job, part.attempt)
                case FetchFiles(part=part):
                    self._kernel.call_at(self._kernel.now_s + self._delays.file_fetch_s, self._files_fetched, part.job)
        if self.machine.site.num_changes != self._reported_changes:
            self.schedule_report(self._delays.report_delay_s)
        next_s = self.machine.next_due_s
        if next_s < math.inf and (self._wake_at_s is None or next_s < self._wake_at_s):
            self._wake_at_s = max(next_s, self._kernel.now_s) + _TIMER_SLACK_S
            self._kernel.call_at(self._wake_at_s, self._on_timer, self._wake_at_s)

    def _on_timer(self, at_s: float) -> None:
        if at_s != self._wake_at_s:
            return
        self._wake_at_s = None
        if self._kernel.now_s >= self.down_until_s:
            self._observe(())

    def _end_run_lease(self, until_s: float) -> None:
        """End the processes of the pool unless the lease was renewed; it works without the agent, as in workers."""
        if self.machine.site.run_lease_until_s > until_s:
            return
        for key, part in list(self.parts.items()):
            work = self.scheduler.find(key)
            if part.has_run_lease and work is not None and work.state == "running":
                self._stop_processes((work, RUN_LEASE_ENDED))

    def _files_fetched(self, job: str) -> None:
        if self._kernel.now_s >= self.down_until_s:
            self.handle(FetchObserved(now_s=self._kernel.now_s, job=job, progress_text="copied", complete=True))

    def _watch_hours(self) -> ProcessGenerator:
        """Observe the owner's hours whenever they may begin or end."""
        self._observe_hours()
        while (at_s := next_change_s(self._policy, self._kernel.now_s)) is not None:
            yield at_s
            self._observe_hours()

    def _observe_hours(self) -> None:
        now_s = self._kernel.now_s
        if now_s >= self.down_until_s:
            is_open, may_move = is_open_at(self._policy, now_s), may_move_at(self._policy, now_s)
            self.handle(HoursObserved(now_s=now_s, is_open=is_open, may_move=may_move))

    def _start_part(self, part: SitePart) -> None:
        key = part.key
        check_in_s = self._kernel.now_s + self._delays.check_in_s
        if not self.scheduler.start(key, check_in_s):
            return
        self._on_process(self.name, key, True)
        if part.local:
            self._on_local_job(self.name, part.job, None)
        else:
            self._kernel.call_at(check_in_s, self._observe_part, key)

    def _stop_processes(self, asked: tuple[SchedulerJob, int]) -> None:
        """Stop a scheduler job, unless another one has taken its name since."""
        work, status = asked
        key = work.key
        if self.scheduler.find(key) is work:
            if self._end_processes(key, status) and key[1]:
                self._runs.lose_part(self.name, key[0], key[1])
            self._observe_part(key)

    def _end_processes(self, key: PartKey, status: int) -> bool:
        ended = self.scheduler.end(key, status)
        if ended:
            self._on_process(self.name, key, False)
        return ended

    def fail_part(self, key: PartKey) -> None:
        """Fail a part because of a node failure."""
        work = self.scheduler.find(key)
        if work is not None:
            self._stop_processes((work, 1))

    def _observe_part(self, key: PartKey) -> None:
        """Observe the processes of a part, unless the agent is down."""
        part, work = self.parts.get(key), self.scheduler.find(key)
        if self._kernel.now_s < self.down_until_s or part is None or not part.live:
            return
        if work is None:
            self._observe(observe_absent(part))
        elif work.state == "running":
            if not part.local and self._kernel.now_s >= work.checked_in_s:
                self._observe(observe_running(part, self.name, self._runs.unsaved_s(*key)))
        elif part.local:
            self.scheduler.remove(key)
            self._on_local_job(self.name, key[0], -1 if part.requeue else work.exit_status)
            self._observe(observe_exited(part, work.exit_status))
        else:
            self._observe(observe_exited(part, work.exit_status))


def _has_checked_in(part: SitePart) -> bool:
    return all(worker.address is not None for worker in part.workers.values())
