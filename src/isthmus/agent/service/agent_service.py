"""The agent's I/O around the site machine: observes workers, saves each decision, then executes it.

The part table is durable before a worker starts or stops and before the server gets a report, so an agent
that is killed at any point resumes from the same state.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import QueueMove, SchedulerAdapter
from isthmus.agent.service.agent_state_folder import (
    AgentStateFolder,
    read_local_jobs,
    read_routes,
    worker_spec,
)
from isthmus.agent.service.file_fetcher import FileFetcher
from isthmus.agent.service.observe_workers import observe_workers
from isthmus.agent.service.part_table import PartTable
from isthmus.agent.service.peer_prober import PeerProber
from isthmus.agent.service.preflight_runner import PreflightRunner
from isthmus.agent.service.telemetry_outbox import TelemetryBatch, TelemetryOutbox
from isthmus.agent.service.worker_event_tails import WorkerEventTails
from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport, ObservedPart, QueueEntry
from isthmus.core.messages.worker_folder import CheckpointRequest, WorkerFolder, write_atomically
from isthmus.core.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster
from isthmus.site import (
    DeviceIdAllocator,
    FetchFiles,
    FetchObserved,
    HoursObserved,
    LocalJobsObserved,
    LogWarning,
    ObservedWorker,
    OrdersReceived,
    PartKey,
    QueueObserved,
    ReorderQueue,
    ReportLocalExit,
    RequestCheckpoint,
    ShutdownRequested,
    SiteEvent,
    SiteInstruction,
    SiteMachine,
    SitePart,
    StartWorker,
    StopWorker,
    WorkersObserved,
    WriteRankMap,
    awaits_checkpoint,
)
from isthmus.wan import PortRange

_NOT_STARTED_STATUS = 126
"""Exit status reported for a worker that could not be started."""

_log = logging.getLogger("isthmus.agent")


class AgentService:
    """The agent of one site: its state machine, adapter and state folder.

    `clock` is monotonic, `wall_clock` counts from the epoch; both in seconds. `fetcher` copies job files to
    the site's own storage folder (None: all sites share a file system). Workers listen at `host`, within `ports`
    if given. With `checks_peers` the agent takes part in the checks that sites reach each other.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        adapter: SchedulerAdapter,
        state: Path,
        clock: Callable[[], float],
        host: str = "127.0.0.1",
        ports: PortRange | None = None,
        checks_peers: bool = False,
        routes: Path | None = None,
        policy: OwnerPolicy | None = None,
        fetcher: FileFetcher | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.cluster, self.adapter, self.state_folder = cluster, adapter, AgentStateFolder(state)
        self._clock, self._wall_clock = clock, wall_clock
        self.policy, self._fetcher = policy or OwnerPolicy(), fetcher
        self._host, self._ports, self._routes = host, ports, routes
        read_routes(routes, cluster.name)
        self._prober = PeerProber(host, ports, lambda: read_routes(routes, cluster.name)) if checks_peers else None
        self._table = PartTable(self.state_folder.path)
        known = self._table.load()
        self.machine = SiteMachine(
            cluster.name,
            DeviceIdAllocator(adapter.inventory()),
            known.parts,
            fence=known.fence,
            priorities=cluster.priorities,
            policy=self.policy,
            has_own_storage=fetcher is not None,
            now_s=clock(),
        )
        self._preflights = PreflightRunner(cluster.name, fetcher.root if fetcher else None, clock)
        self.outbox = TelemetryOutbox(self.state_folder.runs)
        self._event_tails = WorkerEventTails()
        self._deferred: list[SiteInstruction] = []
        self._last_error = ""
        self._save()

    @property
    def stopped(self) -> bool:
        """Whether all parts are released after `shut_down`."""
        return self.machine.shutting_down and not any(part.live for part in self.machine.parts.values())

    @property
    def stop_grace_s(self) -> float:
        """Time between SIGTERM and SIGKILL that the owner grants local jobs."""
        return self.policy.grace_s

    @property
    def needs_fast_poll(self) -> bool:
        """Whether a part is about to change, so that the next poll should come soon."""
        checks = self._preflights.is_open or (self._prober is not None and self._prober.busy)
        return checks or any(_needs_fast_poll(part) for part in self.machine.parts.values())

    def tick(self) -> None:
        """Poll the site once and execute what the machine decides."""
        # Step 1: the owner's opening hours.
        here = datetime.fromtimestamp(self._wall_clock()).astimezone()
        self._handle(HoursObserved(now_s=self._clock(), is_open=self.policy.is_open(here)))
        # Step 2: workers; skipped while deferred instructions make their state stale.
        parts = () if self._deferred else self.machine.parts.values()
        seen = observe_workers(parts, self.state_folder, self.adapter, self._wall_clock())
        self._handle(WorkersObserved(now_s=self._clock(), workers=tuple(seen)))
        # Step 3: file transfers, local jobs and the queue.
        self._observe_fetches()
        jobs, unread = read_local_jobs(self.state_folder, self.cluster)
        self._handle(LocalJobsObserved(now_s=self._clock(), jobs=jobs, unreadable=unread))
        entries = tuple((entry.job, entry.attempt) for entry in self.adapter.read_queue())
        self._handle(QueueObserved(now_s=self._clock(), entries=entries))
        # Step 4: remove folders of finished attempts.
        self._remove_finished_attempts()

    def observed_parts(self) -> tuple[ObservedPart, ...]:
        """Return the pool's parts as reported to the server, with the newest events of their workers."""
        return tuple(self._with_events(one) for one in self.machine.observed_parts())

    def apply_orders(self, orders: AgentOrders) -> None:
        """Execute the server's orders."""
        if self._prober is not None:
            self._prober.apply_orders(orders)
        self._handle(OrdersReceived(now_s=self._clock(), orders=orders))
        if orders.fence >= self.machine.fence:
            self._preflights.update(orders.preflights)

    @property
    def num_running(self) -> int:
        """The number of parts with workers."""
        return sum(part.live for part in self.machine.parts.values())

    def shut_down(self, *, saves_first: bool = False) -> None:
        """Start to stop every worker and release every device; `saves_first`: save pool parts first."""
        if self._prober is not None:
            self._prober.close()
            self._prober = None
        self._preflights.close()
        self._handle(ShutdownRequested(now_s=self._clock(), saves_first=saves_first))

    def report(self, incarnation: str) -> tuple[AgentReport, TelemetryBatch]:
        """Return the next report, and the batch to pass to `outbox.stored` once the server has responded.

        Raises `UnavailableError` while the reported state cannot be saved.
        """
        self._save()
        batch = self.outbox.collect()
        report = AgentReport(
            cluster=self.cluster,
            incarnation=incarnation,
            free_chips=self.machine.free_chips(),
            parts=self.observed_parts(),
            queue=tuple(self.adapter.read_queue()),
            local_jobs=self.machine.local_jobs(),
            free_storage_bytes=self._fetcher.free_bytes() if self._fetcher else None,
            peer_address=self._prober.address() if self._prober else None,
            peer_checks=self._prober.checks() if self._prober else (),
            checks=True,
            preflights=self._preflights.answers(),
            fence=self.machine.fence,
            metrics=tuple(batch.metrics),
            logs=tuple(batch.logs),
        )
        return report, batch

    def _with_events(self, seen: ObservedPart) -> ObservedPart:
        """Return a part's observation with the newest events of its workers."""
        part = self.machine.parts.get((seen.job, seen.attempt))
        if part is None:
            return seen
        events = self._event_tails.newest(self.state_folder.worker_folder(part, rank) for rank in part.workers)
        return seen.model_copy(update={"events": events}) if events else seen

    def _handle(self, event: SiteEvent) -> None:
        """Handle `event`, save the state, execute the instructions.

        If saving fails, instructions are deferred to the next event. `StopWorker` is still executed, since it
        is safe at any time: an agent that finds the worker ended marks the part failed.
        """
        todo, self._deferred = [*self._deferred, *self.machine.handle(event)], []
        try:
            self._save()
            self._last_error = ""
        except UnavailableError as error:
            self._log_once(str(error))
            self._deferred = [step for step in todo if not isinstance(step, StopWorker)]
            todo = [step for step in todo if isinstance(step, StopWorker)]
        for instruction in todo:
            self._execute(instruction)

    def _save(self) -> None:
        self._table.save(self.machine.parts.values(), self.machine.fence)

    def _log_once(self, text: str) -> None:
        """Log an error unless it repeats the previous one."""
        if text != self._last_error:
            _log.error("%s", text)
        self._last_error = text

    def _execute(self, instruction: SiteInstruction) -> None:
        match instruction:
            case StartWorker(part=part, rank=rank):
                self._start_worker(part, rank)
            case StopWorker(part=part, rank=rank, force=force):
                self._stop_worker(self.state_folder.worker_folder(part, rank), force=force)
            case WriteRankMap() | RequestCheckpoint() | ReportLocalExit() | ReorderQueue():
                self._write_instruction(instruction)
            case FetchFiles(part=part, clusters=clusters):
                if self._fetcher is not None and part.spec is not None:
                    self._fetcher.start(part.job, part.spec, clusters)
            case LogWarning(text=text):
                self._log_once(text)

    def _write_instruction(
        self, instruction: WriteRankMap | RequestCheckpoint | ReportLocalExit | ReorderQueue
    ) -> None:
        """Write the files of an instruction; on a full disk retry with a later event."""
        try:
            match instruction:
                case WriteRankMap(part=part):
                    for rank in part.workers:
                        WorkerFolder(self.state_folder.worker_folder(part, rank)).write_rank_map(instruction.rank_map)
                case RequestCheckpoint(part=part):
                    request = CheckpointRequest(after=instruction.after)
                    for rank in part.workers:
                        WorkerFolder(self.state_folder.worker_folder(part, rank)).write_checkpoint_request(request)
                case ReportLocalExit(part=part):
                    WorkerFolder(self.state_folder.local / part.job).write_exit(instruction.exit_status)
                case ReorderQueue():
                    moves = [
                        QueueMove(entry=_queue_entry(key), after=after and _queue_entry(after))
                        for key, after in instruction.moves
                    ]
                    self.adapter.reorder_queue(moves, [_queue_entry(key) for key in instruction.removed])
        except OSError as error:
            self._log_once(f"{type(instruction).__name__}: cannot write, will retry: {error}")
            if isinstance(instruction, WriteRankMap | RequestCheckpoint):
                self._deferred.append(instruction)

    def _start_worker(self, part: SitePart, rank: int) -> None:
        folder, worker = self.state_folder.worker_folder(part, rank), part.workers.get(rank)
        if worker is None or part.state != "running":
            return
        try:
            if part.local:
                write_atomically(WorkerFolder(folder).started_path, "")
            else:
                routes = read_routes(self._routes, self.cluster.name)
                root = self._fetcher.root if self._fetcher else None
                spec = worker_spec(
                    part, rank, self.cluster, host=self._host, ports=self._ports, routes=routes, storage=root
                )
                WorkerFolder(folder).write_spec(spec)
            self.adapter.start(folder, worker.devices, part.command)
        except (IsthmusError, OSError, ValueError) as error:
            _log.error("%s: %s", folder, error)
            self._stop_worker(folder, force=True)
            seen = ObservedWorker(
                job=part.job,
                attempt=part.attempt,
                rank=rank,
                state="exited",
                exit_status=_NOT_STARTED_STATUS,
                log_tail=str(error),
            )
            self._handle(WorkersObserved(now_s=self._clock(), workers=(seen,)))

    def _stop_worker(self, folder: Path, *, force: bool) -> None:
        """Stop a worker; if a full disk prevents claiming its folder, the machine repeats the instruction."""
        try:
            self.adapter.stop(folder, force=force)
        except OSError as error:
            _log.error("%s: cannot stop worker, will retry: %s", folder, error)

    def _observe_fetches(self) -> None:
        for job, fetch in (self._fetcher.poll() if self._fetcher else {}).items():
            now_s, text = self._clock(), fetch.progress_text
            self._handle(
                FetchObserved(now_s=now_s, job=job, progress_text=text, complete=fetch.complete, failed=fetch.failed)
            )

    def _remove_finished_attempts(self) -> None:
        """Remove folders of attempts that no order lists and whose telemetry the server has stored."""
        for attempt in self.state_folder.runs.glob("*/*"):
            if not attempt.name.isdecimal():  # not an attempt folder
                continue
            key = attempt.parent.name, int(attempt.name)
            if key not in self.machine.parts and self.outbox.is_attempt_drained(attempt):
                self._event_tails.forget(attempt.glob("rank-*"))
                shutil.rmtree(attempt, ignore_errors=True)
                if not any(attempt.parent.iterdir()):
                    attempt.parent.rmdir()


def _needs_fast_poll(part: SitePart) -> bool:
    if part.state == "running":
        return not part.local and (part.rank_map is None or awaits_checkpoint(part))
    return part.state in (
        "ready",
        "evicting",
        "prepared",
        "refused",
        "stopping",
        "failed",
        "succeeded",
        "released",
    )


def _queue_entry(key: PartKey) -> QueueEntry:
    return QueueEntry(job=key[0], attempt=key[1])
