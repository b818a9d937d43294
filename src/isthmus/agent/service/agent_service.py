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

from isthmus.agent.adapters.adapter import Adapter, Move
from isthmus.agent.service.fetches import Fetches
from isthmus.agent.service.metrics_outbox import Batch, Outbox
from isthmus.agent.service.observe_workers import look
from isthmus.agent.service.part_table import PartTable
from isthmus.agent.service.run_folders import StateFolder, local_jobs, read_routes, worker_spec
from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport, QueueEntry
from isthmus.core.messages.worker_folder import ProtectRequest, WorkerFolder, write_atomically
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster
from isthmus.site import (
    DeviceIds,
    Event,
    FetchFiles,
    FetchObserved,
    HoursObserved,
    Instruction,
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
    SiteMachine,
    SitePart,
    StartWorker,
    StopWorker,
    WorkersObserved,
    WriteRankMap,
    awaits_checkpoint,
)

_NOT_STARTED = 126
"""Exit status reported for a worker that could not be started."""

_log = logging.getLogger("isthmus.agent")


class AgentShell:
    """The agent of one site: its state machine, adapter and state folder.

    `clock` is monotonic, `wall_clock` counts from the epoch; both in seconds. `fetches` copies job files to
    the site's own storage folder (None: all sites share a file system).
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        adapter: Adapter,
        state: Path,
        clock: Callable[[], float],
        host: str = "127.0.0.1",
        routes: Path | None = None,
        policy: OwnerPolicy | None = None,
        fetches: Fetches | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.cluster, self.adapter, self.folders = cluster, adapter, StateFolder(state)
        self._clock, self._wall_clock = clock, wall_clock
        self._policy, self._fetches = policy or OwnerPolicy(), fetches
        self._host, self._routes = host, routes
        read_routes(routes, cluster.name)
        self._table = PartTable(self.folders.path)
        known = self._table.load()
        self.machine = SiteMachine(
            cluster.name,
            DeviceIds(adapter.inventory()),
            known.parts,
            fence=known.fence,
            priorities=cluster.priorities,
            policy=self._policy,
            fetches=fetches is not None,
            now_s=clock(),
        )
        self.outbox = Outbox(self.folders.runs)
        self._waiting: list[Instruction] = []
        self._complaint = ""
        self._save()

    @property
    def ended(self) -> bool:
        """Whether all parts are released after `shut_down`."""
        return self.machine.ending and not any(part.live for part in self.machine.parts.values())

    @property
    def busy(self) -> bool:
        """Whether a part is about to change, so that the next poll should come soon."""
        return any(_about_to_change(part) for part in self.machine.parts.values())

    def tick(self) -> None:
        """Poll the site once and execute what the machine decides."""
        # Step 1: the owner's opening hours.
        here = datetime.fromtimestamp(self._wall_clock()).astimezone()
        self._apply(HoursObserved(now_s=self._clock(), is_open=self._policy.is_open(here)))
        # Step 2: workers; skipped while deferred instructions make their state stale.
        parts = () if self._waiting else self.machine.parts.values()
        seen = look(parts, self.folders, self.adapter, self._wall_clock())
        self._apply(WorkersObserved(now_s=self._clock(), workers=tuple(seen)))
        # Step 3: file transfers, local jobs and the queue.
        self._look_at_files()
        jobs, unread = local_jobs(self.folders, self.cluster)
        self._apply(LocalJobsObserved(now_s=self._clock(), jobs=jobs, unread=unread))
        entries = tuple((entry.job, entry.attempt) for entry in self.adapter.queue())
        self._apply(QueueObserved(now_s=self._clock(), entries=entries))
        # Step 4: remove folders of finished attempts.
        self._clear()

    def obey(self, orders: AgentOrders) -> None:
        """Execute the server's orders."""
        self._apply(OrdersReceived(now_s=self._clock(), orders=orders))

    def shut_down(self) -> None:
        """Start to stop every worker and release every device."""
        self._apply(ShutdownRequested(now_s=self._clock()))

    def report(self, incarnation: str) -> tuple[AgentReport, Batch]:
        """Return the next report, and the batch to pass to `outbox.stored` once the server has responded.

        Raises `UnavailableError` while the reported state cannot be saved.
        """
        self._save()
        batch = self.outbox.collect()
        report = AgentReport(
            cluster=self.cluster,
            incarnation=incarnation,
            free_chips=self.machine.free_chips(),
            parts=self.machine.observed(),
            queue=tuple(self.adapter.queue()),
            local_jobs=self.machine.local_jobs(),
            free_storage_bytes=self._fetches.free_bytes() if self._fetches else None,
            metrics=tuple(batch.metrics),
            logs=tuple(batch.logs),
        )
        return report, batch

    def _apply(self, event: Event) -> None:
        """Handle `event`, save the state, execute the instructions.

        If saving fails, instructions are deferred to the next event. `StopWorker` is still executed, since it
        is safe at any time: an agent that finds the worker ended marks the part failed.
        """
        todo, self._waiting = [*self._waiting, *self.machine.handle(event)], []
        try:
            self._save()
            self._complaint = ""
        except UnavailableError as error:
            self._complain(str(error))
            self._waiting = [step for step in todo if not isinstance(step, StopWorker)]
            todo = [step for step in todo if isinstance(step, StopWorker)]
        for instruction in todo:
            self._do(instruction)

    def _save(self) -> None:
        self._table.save(self.machine.parts.values(), self.machine.fence)

    def _complain(self, text: str) -> None:
        """Log an error unless it repeats the previous one."""
        if text != self._complaint:
            _log.error("%s", text)
        self._complaint = text

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case StartWorker(part=part, rank=rank):
                self._start(part, rank)
            case StopWorker(part=part, rank=rank, force=force):
                self._stop(self.folders.of(part, rank), force=force)
            case WriteRankMap() | RequestCheckpoint() | ReportLocalExit() | ReorderQueue():
                self._write_down(instruction)
            case FetchFiles(part=part, clusters=clusters):
                if self._fetches is not None and part.spec is not None:
                    self._fetches.begin(part.job, part.spec, clusters)
            case LogWarning(text=text):
                self._complain(text)

    def _write_down(
        self, instruction: WriteRankMap | RequestCheckpoint | ReportLocalExit | ReorderQueue
    ) -> None:
        """Write the files of an instruction; on a full disk retry with a later event."""
        try:
            match instruction:
                case WriteRankMap(part=part):
                    for rank in part.workers:
                        WorkerFolder(self.folders.of(part, rank)).write_ranks(instruction.rank_map)
                case RequestCheckpoint(part=part):
                    request = ProtectRequest(after=instruction.after)
                    for rank in part.workers:
                        WorkerFolder(self.folders.of(part, rank)).write_protect(request)
                case ReportLocalExit(part=part):
                    WorkerFolder(self.folders.local / part.job).write_exit(instruction.exit_status)
                case ReorderQueue():
                    moves = [
                        Move(entry=_entry(key), after=after and _entry(after))
                        for key, after in instruction.moves
                    ]
                    self.adapter.order(moves, [_entry(key) for key in instruction.gone])
        except OSError as error:
            self._complain(f"{type(instruction).__name__}: cannot write, will retry: {error}")
            if isinstance(instruction, WriteRankMap | RequestCheckpoint):
                self._waiting.append(instruction)

    def _start(self, part: SitePart, rank: int) -> None:
        folder, worker = self.folders.of(part, rank), part.workers.get(rank)
        if worker is None or part.state != "running":
            return
        try:
            if part.local:
                write_atomically(WorkerFolder(folder).started, "")
            else:
                routes = read_routes(self._routes, self.cluster.name)
                root = self._fetches.root if self._fetches else None
                spec = worker_spec(part, rank, self.cluster, host=self._host, routes=routes, storage=root)
                WorkerFolder(folder).write_spec(spec)
            self.adapter.start(folder, worker.devices, part.command)
        except (IsthmusError, OSError, ValueError) as error:
            _log.error("%s: %s", folder, error)
            self._stop(folder, force=True)
            seen = ObservedWorker(
                job=part.job,
                attempt=part.attempt,
                rank=rank,
                state="exited",
                exit_status=_NOT_STARTED,
                last_words=str(error),
            )
            self._apply(WorkersObserved(now_s=self._clock(), workers=(seen,)))

    def _stop(self, folder: Path, *, force: bool) -> None:
        """Stop a worker; if a full disk prevents claiming its folder, the machine repeats the instruction."""
        try:
            self.adapter.stop(folder, force=force)
        except OSError as error:
            _log.error("%s: cannot stop worker, will retry: %s", folder, error)

    def _look_at_files(self) -> None:
        for job, fetch in (self._fetches.seen() if self._fetches else {}).items():
            now_s, text = self._clock(), fetch.words
            self._apply(FetchObserved(now_s=now_s, job=job, words=text, here=fetch.here, failed=fetch.failed))

    def _clear(self) -> None:
        """Remove folders of attempts that no order lists and whose telemetry the server has stored."""
        for attempt in self.folders.runs.glob("*/*"):
            if not attempt.name.isdecimal():  # not an attempt folder
                continue
            key = attempt.parent.name, int(attempt.name)
            if key not in self.machine.parts and self.outbox.drained(attempt):
                shutil.rmtree(attempt, ignore_errors=True)
                if not any(attempt.parent.iterdir()):
                    attempt.parent.rmdir()


def _about_to_change(part: SitePart) -> bool:
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


def _entry(key: PartKey) -> QueueEntry:
    return QueueEntry(job=key[0], attempt=key[1])
