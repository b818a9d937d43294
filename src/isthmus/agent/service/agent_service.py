"""The agent's I/O around the site machine: observes workers, saves each decision, then executes it.

The part table is durable before a worker starts or stops and before the server gets a report, so an agent
that is killed at any point resumes from the same state.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from isthmus.agent.adapters.local_adapter import job_program
from isthmus.agent.adapters.scheduler_adapter import QueueMove, RankStart, SchedulerAdapter, SchedulerLook
from isthmus.agent.adapters.worker_limits import (
    act_as_user,
    limits_for,
    open_to_account,
    require_confined,
    write_limits,
)
from isthmus.agent.containers.node_containers import NodeContainers
from isthmus.agent.containers.part_renderer import PartRenderer, rank_variables, start_kind
from isthmus.agent.containers.part_rendering import PartRendering
from isthmus.agent.containers.worker_containers import WorkerContainers
from isthmus.agent.files.card_keeper import CardKeeper
from isthmus.agent.files.file_fetcher import FileFetcher
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.files.version_fetcher import VersionFetcher
from isthmus.agent.metrics.agent_figures import agent_figures
from isthmus.agent.metrics.sync_counts import SyncCounts
from isthmus.agent.network.peer_prober import PeerProber
from isthmus.agent.network.promised_rates import PromiseFile
from isthmus.agent.preflight.preflight_runner import PreflightRunner
from isthmus.agent.service.agent_state_folder import (
    AgentStateFolder,
    devices_for,
    read_local_jobs,
    read_routes,
    worker_spec,
)
from isthmus.agent.service.observe_workers import observe_workers
from isthmus.agent.service.part_table import PartTable
from isthmus.agent.service.scheduler_calls import SchedulerCalls
from isthmus.agent.service.site_holds import SiteHolds, foreign_part
from isthmus.agent.service.site_paths import SitePaths
from isthmus.agent.service.telemetry_outbox import TelemetryBatch, TelemetryOutbox
from isthmus.agent.service.worker_event_tails import WorkerEventTails
from isthmus.core.errors import InputError, IsthmusError, UnavailableError
from isthmus.core.job import Job
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.agent_messages import (
    AgentIdentity,
    AgentOrders,
    AgentReport,
    ObservedPart,
    PartOrder,
    QueueEntry,
)
from isthmus.core.messages.run_lease import NO_LIMIT_S, RunLease, read_run_lease, write_run_lease
from isthmus.core.messages.worker_folder import (
    CheckpointRequest,
    WorkerAccount,
    WorkerFolder,
    WorkerKeys,
    write_atomically,
)
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.pool import Cluster, Pool
from isthmus.core.process.boot_clock import boot_id
from isthmus.site import (
    FetchFiles,
    FetchObserved,
    HoursObserved,
    InventoryObserved,
    LocalJobsObserved,
    LogWarning,
    ObservedWorker,
    OrdersReceived,
    PartKey,
    QueueObserved,
    RenewRunLease,
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
    make_allocator,
)
from isthmus.wan import CentreAddress, CentreClient, PortRange

_NOT_STARTED_STATUS = 126
"""Exit status reported for a worker that could not be started."""

LOOK_INTERVAL_S = 2.0
"""Interval between two looks at a scheduler that answers through commands or requests."""

RENEWAL_S = 2.0
"""Interval at which the run lease is written where workers may run on other machines: they wait for a renewal."""

_OPTIMISTIC = "optimistic: the site's scheduler holds no cards, so a start may find them taken"

_MISSING_LEASE_S = 5.0
"""How long parts count as running that have lost the file of their lease: their workers end themselves meanwhile."""

_log = logging.getLogger("isthmus.agent")


class AgentService:
    """The agent of one site: its state machine, adapter and state folder; `identity` binds it to the folder.

    `clock` is `boot_time_s`, by which workers judge their lease, `wall_clock` counts from the epoch; both in seconds.
    `fetcher` copies job files to the site's own storage folder (None: all sites share a file system), `versions` those
    of the catalogue to its cache (None: the site brings none). Workers listen at
    `host`, within `ports` if given. With `checks_peers` the agent takes part in the checks that sites reach each other.
    `promises` is the file for the rates that jobs are promised on links (None: none is written).
    `pool` has the chips and links that parts are rendered with. No worker may read the files `secrets`. Workers start
    with the keys that the server sent for their links; without them, with `needs_keys` or beyond loopback, they do not
    start. `on_answer` is called in another thread when the scheduler has answered: the next `tick` takes it up.
    `centre` is the decision centre of the network, where parts that are promised bandwidth get their paths.
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
        needs_keys: bool = False,
        routes: Path | None = None,
        promises: Path | None = None,
        policy: OwnerPolicy | None = None,
        fetcher: FileFetcher | None = None,
        versions: VersionFetcher | None = None,
        identity: AgentIdentity | None = None,
        containers: WorkerContainers | NodeContainers | None = None,
        pool: Pool | None = None,
        secrets: Sequence[Path] = (),
        wall_clock: Callable[[], float] = time.time,
        on_answer: Callable[[], object] = lambda: None,
        centre: CentreAddress | None = None,
    ) -> None:
        self.cluster, self.adapter, self.state_folder = cluster, adapter, AgentStateFolder(state)
        self._clock, self._wall_clock = clock, wall_clock
        self.policy, self._fetcher = policy or OwnerPolicy(), fetcher
        self._containers = containers
        pool, starts = pool or Pool(clusters=(cluster,)), start_kind(adapter.capabilities.containers)
        can = adapter.capabilities
        apart = can.node_images is not None
        renderer = PartRenderer(self.policy.workers, pool, cluster.name, starts, can.storage_path, apart=apart)
        self._rdma = pool.rdma_peers(cluster.name)
        self._rendering = PartRendering(renderer, clock, self._resolved_job)
        self._protected = (self.state_folder.path, *secrets)
        self._host, self._ports, self._routes = host, ports, routes
        read_routes(routes, cluster.name)
        self._promises = PromiseFile(promises, cluster.name) if promises else None
        self._prober = PeerProber(host, ports, lambda: read_routes(routes, cluster.name)) if checks_peers else None
        self._table, self._cards = PartTable(self.state_folder.path), CardKeeper(self.state_folder.path, wall_clock)
        self._cards_due = True
        known = self._table.load()
        self._calls = SchedulerCalls(blocks=adapter.capabilities.blocks, on_answer=on_answer)
        self._look = SchedulerLook(nodes=())
        key = identity.key if identity else cluster.name
        self._holds = SiteHolds(adapter, self._calls, key, self._handle, clock, wall_clock, self._rendering.containers)
        self._path_calls = SchedulerCalls(blocks=centre is not None, on_answer=on_answer, what="decision centre")
        self._paths: SitePaths | None = None
        if centre is not None:
            self._paths = SitePaths(CentreClient(centre), self._path_calls, cluster.name, self._handle)
        self._next_look_s = 0.0
        if not adapter.capabilities.blocks:
            self._look = adapter.observe()
        self._identity, self._sent_s = identity, clock()
        self.state_folder.make_lease_folder()
        lease = read_run_lease(self.state_folder.run_lease)
        lease = lease if lease and lease.is_of_this_machine else None
        self.machine = SiteMachine(
            cluster.name,
            make_allocator(cluster, self._devices()),
            known.parts,
            fence=known.fence,
            run_lease_s=lease.lease_s if lease else 0.0,
            run_lease_until_s=lease.until_s if lease else clock() + _MISSING_LEASE_S,
            renewal_s=RENEWAL_S if adapter.capabilities.blocks else math.inf,
            priorities=cluster.priorities,
            policy=self.policy,
            has_own_storage=fetcher is not None,
            asks_for_holds=adapter.capabilities.holds == "scheduler",
            asks_for_probes=adapter.capabilities.probes,
            asks_for_paths=centre is not None,
            knows_inventory=not adapter.capabilities.blocks,
            now_s=clock(),
        )
        self._versions = versions
        self._storage = SiteStorage(
            self.policy.storage, fetcher.root if fetcher else None, versions.cache if versions else None
        )
        act_as = partial(act_as_user, self.policy.workers)
        self._preflights = PreflightRunner(cluster.name, self._storage, clock, act_as=act_as)
        self.outbox = TelemetryOutbox(self.state_folder.runs)
        self._event_tails = WorkerEventTails()
        self._needs_keys = needs_keys or not is_loopback(host)
        self._run_keys: dict[PartKey, WorkerKeys] = {}
        self._deferred: list[SiteInstruction] = []
        self._last_error = ""
        self._save()

    @property
    def stopped(self) -> bool:
        """Whether all parts are released after `shut_down`."""
        ended = not any(part.live for part in self.machine.parts.values()) and self._holds.settled
        ended = ended and (self._paths is None or self._paths.settled or self._path_calls.has_failed)
        return self.machine.shutting_down and ended

    @property
    def stop_grace_s(self) -> float:
        """Time between SIGTERM and SIGKILL that the owner grants local jobs."""
        return self.policy.grace_s

    @property
    def needs_fast_poll(self) -> bool:
        """Whether a part is about to change, so that the next poll should come soon."""
        checks = (
            self._calls.busy
            or self._path_calls.busy
            or self._preflights.is_open
            or (self._prober is not None and self._prober.busy)
        )
        return checks or any(_needs_fast_poll(part) for part in self.machine.parts.values())

    def tick(self) -> None:
        """Poll the site once and execute what the machine decides."""
        # Step 1: answers of the scheduler, and the owner's opening hours.
        self._calls.collect()
        self._path_calls.collect()
        here = datetime.fromtimestamp(self._wall_clock()).astimezone()
        is_open, may_move = self.policy.is_open(here), self.policy.moves.is_open(here)
        self._handle(HoursObserved(now_s=self._clock(), is_open=is_open, may_move=may_move))
        # Step 2: workers; skipped while deferred instructions make their state stale.
        parts = () if self._deferred else self.machine.parts.values()
        seen = observe_workers(
            parts, self.state_folder, self.adapter, self._wall_clock(), is_starting=self._calls.is_open
        )
        self._handle(WorkersObserved(now_s=self._clock(), workers=tuple(seen)))
        # Step 3: file transfers, local jobs and the queue.
        self._observe_fetches()
        if self.adapter.capabilities.holds == "agent":
            jobs, unread = read_local_jobs(self.state_folder, self.cluster)
            self._handle(LocalJobsObserved(now_s=self._clock(), jobs=jobs, unreadable=unread))
        self._look_at_scheduler()
        if self._paths is not None:
            self._paths.reconcile(self.machine.parts.values(), self._clock())
        # Step 4: remove folders of finished attempts; state what the site's edge has to send.
        self._remove_finished_attempts()
        if self._promises is not None:
            try:
                self._promises.update(self.machine.parts.values())
            except UnavailableError as error:
                self._log_once(str(error))

    def _devices(self) -> dict[str, tuple[str, ...]]:
        """Return the devices of each node group of `pool.yaml`, as last seen."""
        seen = self._look.cards()
        return {group.name: seen.get(group.name, ()) for group in self.cluster.node_groups}

    def _look_at_scheduler(self) -> None:
        """Look at the scheduler when it is time; ask it for the holds that parts want, and release the others."""
        now_s = self._clock()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + (LOOK_INTERVAL_S if self.adapter.capabilities.blocks else 0.0)
            self._calls.submit("look", self.adapter.observe, self._observe_look)
        if self.adapter.capabilities.holds == "scheduler":
            self._holds.reconcile(self.machine.parts.values(), now_s, self.machine.run_lease_s())

    def _observe_look(self, look: SchedulerLook) -> None:
        now_s, self._look = self._clock(), look
        if self.adapter.capabilities.blocks:
            level = self.cluster.priorities.middle
            may = self.adapter.capabilities.preempts
            running = (job for job in look.foreign if job.running and job.cards)
            foreign = tuple(foreign_part(job, level, may_preempt=may) for job in running)
            self._handle(InventoryObserved(now_s=now_s, devices=self._devices(), foreign=foreign))
            self._holds.observe_look(look)
        entries = tuple((entry.job, entry.attempt) for entry in look.queue)
        self._handle(QueueObserved(now_s=now_s, entries=entries))

    def observed_parts(self) -> tuple[ObservedPart, ...]:
        """Return the pool's parts as reported to the server, with the newest events of their workers."""
        parts = tuple(self._with_events(one) for one in self.machine.observed_parts())
        if self.adapter.capabilities.holds != "none":
            return parts
        return tuple(
            one.model_copy(update={"detail": one.detail or _OPTIMISTIC}) if one.state in ("ready", "prepared") else one
            for one in parts
        )

    def apply_orders(self, orders: AgentOrders) -> None:
        """Execute the server's orders."""
        if self._prober is not None:
            self._prober.apply_orders(orders)
        if orders.fence >= self.machine.fence:
            self._run_keys |= {
                (one.job, one.attempt): WorkerKeys(keys=one.keys, copies=one.copies, switch=one.switch)
                for one in orders.run_keys
            }
        objections = self._rendering.objections(one for one in orders.parts if self._may_be_refused(one))
        self._handle(OrdersReceived(now_s=self._clock(), orders=orders, sent_s=self._sent_s, objections=objections))
        self._run_keys = {key: one for key, one in self._run_keys.items() if key in self.machine.parts}
        if orders.fence >= self.machine.fence:
            self._preflights.update(orders.preflights)
            if self._versions is not None:
                parts = [one for one in orders.parts if one.desired != "released"]
                self._versions.update((one for part in parts for one in part.versions), orders.drop_copies)

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
        if self._versions is not None:
            self._versions.close()
        self._handle(ShutdownRequested(now_s=self._clock(), saves_first=saves_first))

    def report(self, incarnation: str) -> tuple[AgentReport, TelemetryBatch]:
        """Return the next report, and the batch to pass to `outbox.stored` once the server has responded.

        Raises `UnavailableError` while the reported state cannot be saved.
        """
        self._save()
        batch, identity = self.outbox.collect(), self._identity
        self._sent_s = self._clock()
        report = AgentReport(
            clock_s=self._sent_s,
            cluster=self.cluster,
            incarnation=incarnation,
            identity=identity and identity.model_copy(update={"saves": self._table.saves}),
            run_lease_s=self.machine.run_lease_s(),
            moves=self.machine.moves(),
            free_chips=self.machine.free_chips(),
            parts=self.observed_parts(),
            queue=self._look.queue,
            local_jobs=self.machine.local_jobs(),
            free_storage_bytes=self._fetcher.free_bytes() if self._fetcher else None,
            peer_address=self._prober.address() if self._prober else None,
            peer_checks=self._prober.checks() if self._prober else (),
            checks=True,
            preflights=self._preflights.answers(),
            copies=self._versions.copies() if self._versions else None,
            fetch_gbps=self._versions.fetch_gbps if self._versions else None,
            fence=self.machine.fence,
            metrics=tuple(batch.metrics),
            logs=tuple(batch.logs),
        )
        return report, batch

    def figures(self, syncs: SyncCounts) -> bytes:
        """Return the page of the agent's own metrics."""
        return agent_figures(
            self.machine, syncs, now_s=self._clock(), num_deferred=len(self._deferred), wall_s=self._wall_clock()
        )

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
        self._cards_due |= self._table.save(self.machine.parts.values(), self.machine.fence)
        if self._cards_due:
            self._cards.update(self.machine.parts.values(), self._holds.hold_id)
            self._cards_due = False

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
            case WriteRankMap() | RequestCheckpoint() | ReportLocalExit() | ReorderQueue() | RenewRunLease():
                self._write_instruction(instruction)
            case FetchFiles():
                self._fetch_files(instruction)
            case LogWarning(text=text):
                self._log_once(text)

    def _may_be_refused(self, order: PartOrder) -> bool:
        """Return whether the machine decides at this order whether the site takes the part."""
        part = self.machine.parts.get((order.job, order.attempt))
        return part is None or part.state in ("new", "ready") or (part.state == "queued" and order.desired != "queued")

    def _resolved_job(self, job_id: str, job: Job, user: str) -> Job:
        """Return a job with the places of its paths here; one that its user may not use is refused elsewhere."""
        with contextlib.suppress(InputError):
            return self._storage.resolve_job(job_id, job, user)[0]
        return job

    def _fetch_files(self, instruction: FetchFiles) -> None:
        """Start to copy the files of a part's job, unless they would land outside the storage of its user."""
        part = instruction.part
        if self._fetcher is None or part.spec is None:
            return
        try:
            self._storage.resolve_job(part.job, part.spec, part.user)
        except InputError as error:
            seen = FetchObserved(
                now_s=self._clock(), job=part.job, progress_text=str(error), complete=False, failed=True
            )
            self._handle(seen)
        else:
            self._fetcher.start(
                part.job, part.spec, instruction.clusters, with_checkpoints=instruction.with_checkpoints,
                admits=partial(self._storage.may_read, user=part.user),
            )  # fmt: skip

    def _write_instruction(
        self, instruction: WriteRankMap | RequestCheckpoint | ReportLocalExit | ReorderQueue | RenewRunLease
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
                case RenewRunLease(lease_s=lease_s, until_s=until_s):
                    until_s, now_s = min(until_s, NO_LIMIT_S), self._clock()
                    lease = RunLease(boot=boot_id(), lease_s=lease_s, until_s=until_s, written_s=now_s)
                    write_run_lease(self.state_folder.run_lease, lease)
                case ReorderQueue():
                    moves = [
                        QueueMove(entry=_queue_entry(key), after=after and _queue_entry(after))
                        for key, after in instruction.moves
                    ]
                    removed = [_queue_entry(key) for key in instruction.removed]
                    self._calls.submit("order", partial(self.adapter.order, moves, removed))
        except OSError as error:
            self._log_once(f"{type(instruction).__name__}: cannot write, will retry: {error}")
            if isinstance(instruction, WriteRankMap | RequestCheckpoint | RenewRunLease):
                self._deferred.append(instruction)

    def _start_worker(self, part: SitePart, rank: int) -> None:
        folder, worker = self.state_folder.worker_folder(part, rank), part.workers.get(rank)
        command, variables, image = tuple(part.command), dict[str, str](), ""
        if worker is None or part.state != "running":
            return
        try:
            if part.local:
                write_atomically(WorkerFolder(folder).started_path, "")
            else:
                if WorkerFolder(folder).exit_path.exists():  # of a part that left and joins the same attempt again
                    self._remove_attempt(folder.parent)
                routes = read_routes(self._routes, self.cluster.name)
                spec = worker_spec(
                    part, rank, self.cluster, host=self._host, ports=self._ports, routes=routes, rdma=self._rdma,
                    storage=self._storage, run_lease=self.state_folder.run_lease,
                )  # fmt: skip
                spec, rendered = self._rendering.render_worker(folder, part, spec)
                limits = limits_for(
                    folder, self.policy.workers, part.user, spec.storage,
                    protected=self._protected, also_read=(self.state_folder.run_lease.parent,),
                )  # fmt: skip
                require_confined(spec, limits)
                if program := job_program(spec.job, self._rendering.program(rendered)):
                    command = (*program, str(folder))
                WorkerFolder(folder).write_spec(spec)
                if self._containers is None:
                    variables, image = rank_variables(rendered), self._rendering.image(rendered)
                    write_limits(WorkerFolder(folder), limits)
                else:
                    lease = self.state_folder.run_lease.parent
                    command = self._containers.prepare(
                        folder, spec, rendered, worker.devices, limits.account,
                        protected=self._protected, also_read=(lease,),
                    )  # fmt: skip
                    open_to_account(WorkerFolder(folder), limits.account)
                self._hand_over_keys(part, WorkerFolder(folder), limits.account)
        except (IsthmusError, OSError, ValueError) as error:
            self._give_up_worker(part, rank, error)
            return
        hold = self._holds.hold_id(part) if part.hold else ""
        start = RankStart(
            folder=folder, cards=devices_for(part, rank), command=command, hold=hold, variables=variables, image=image
        )
        give_up = partial(self._give_up_worker, part, rank)
        self._calls.submit(folder, partial(self.adapter.start, start), on_error=give_up)

    def _give_up_worker(self, part: SitePart, rank: int, error: Exception) -> None:
        """Make sure that a worker which could not be started never starts, and tell the machine why."""
        folder = self.state_folder.worker_folder(part, rank)
        _log.error("%s: %s", folder, error)
        self._stop_worker(folder, force=True)
        seen = ObservedWorker(
            job=part.job,
            attempt=part.attempt,
            rank=rank,
            state="exited",
            exit_status=error.exit_code if isinstance(error, InputError) else _NOT_STARTED_STATUS,
            log_tail=str(error),
        )
        self._handle(WorkersObserved(now_s=self._clock(), workers=(seen,)))

    def _hand_over_keys(self, part: SitePart, folder: WorkerFolder, account: WorkerAccount | None) -> None:
        """Write the keys of the part's links for a worker; raise `UnavailableError` if they are needed and missing.

        The server sends them once: an agent that ended before the start of the worker has left them in its folder.
        """
        keys = self._run_keys.get(part.key) or folder.left_keys(account)
        if keys is not None:
            folder.write_keys(keys, account)
        elif self._needs_keys:
            raise UnavailableError(
                f"the server sent no keys for links of {part.job}/{part.attempt}; without them no worker listens",
                hint="use the same release of agent and server; the job restarts automatically",
            )

    def _stop_worker(self, folder: Path, *, force: bool) -> None:
        """Stop a worker; if a full disk prevents claiming its folder, the machine repeats the instruction."""

        def retry(error: Exception) -> None:
            _log.error("%s: cannot stop worker, will retry: %s", folder, error)

        stop = partial(self.adapter.stop, folder, force=force)
        self._calls.submit(("stop", folder), stop, on_error=retry)

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
                self._remove_attempt(attempt)
                if not any(attempt.parent.iterdir()):
                    attempt.parent.rmdir()

    def _remove_attempt(self, attempt: Path) -> None:
        self._event_tails.forget(attempt.glob("rank-*"))
        self.outbox.forget(attempt)
        shutil.rmtree(attempt, ignore_errors=True)


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
