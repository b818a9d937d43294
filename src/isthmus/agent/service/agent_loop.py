"""`run_agent`: the main loop of a site agent: observe, sync, execute orders.

It polls faster while parts change and backs off while the server is unreachable.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
import uuid
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.agent.adapters.adapter_kinds import SiteContext, make_adapter
from isthmus.agent.adapters.local_adapter import WORKER_COMMAND
from isthmus.agent.adapters.scheduler_adapter import Capabilities
from isthmus.agent.adapters.worker_limits import check_rights, describe_isolation
from isthmus.agent.containers.node_containers import NodeContainers
from isthmus.agent.containers.part_renderer import refuse_images
from isthmus.agent.containers.site_runtime import check_containers
from isthmus.agent.containers.worker_containers import WorkerContainers
from isthmus.agent.files.file_fetcher import FileFetcher
from isthmus.agent.files.file_transfer import read_sources
from isthmus.agent.files.http_source import HttpReader
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.agent.files.version_cache import VersionCache
from isthmus.agent.files.version_fetcher import VersionFetcher
from isthmus.agent.files.version_source import VersionSource
from isthmus.agent.metrics.metrics_listener import MetricsListener
from isthmus.agent.metrics.sync_counts import SyncCounts
from isthmus.agent.network.own_address import own_address, resolve_host
from isthmus.agent.service.agent_key import AgentKey
from isthmus.agent.service.agent_service import AgentService
from isthmus.agent.service.crossings_started import crossings_started
from isthmus.agent.service.state_identity import open_identity
from isthmus.agent.service.sync_client import SyncClient
from isthmus.agent.service.telemetry_outbox import TelemetryBatch
from isthmus.agent.service.use_found_topology import use_found_topology
from isthmus.core.errors import AuthError, ConflictError, InputError, IsthmusError, UnavailableError
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster, Pool
from isthmus.core.process.boot_clock import boot_time_s
from isthmus.core.process.state_folder_lock import lock_state_folder
from isthmus.core.process.stop_signals import handled_stop_signals
from isthmus.wan import CentreAddress, PortRange

FAST_POLL_S = 0.05
"""Poll and sync interval while a part is about to change."""

POLL_S = 0.2
"""Poll interval for workers otherwise."""

STOP_MARGIN_S = 120.0
"""Wait for the end of killed workers when the agent stops, beyond their grace; a blocked disk can exceed it."""

CACHE_FOLDER = "cache"
"""Folder of copies of the catalogue in the state folder."""

PAGE_INTERVAL_S = 2.0
"""Interval at which the page of the agent's metrics is made."""

_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.2, 5.0

_log = logging.getLogger("isthmus.agent")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Configuration of one site's agent."""

    # URL of the control plane.
    server: str
    # Token of the cluster's owner; None: the key in the state folder, which the agent renews.
    token: str | None
    cluster: Cluster
    # Folder that persists across restarts.
    state: Path
    # Address where the site's workers listen; None: this machine's address towards the server.
    host: str | None = None
    # First and last port for workers; None: any free ones.
    ports: PortRange | None = None
    # JSON file `{cluster: {other: "host:port"}}` of proxies to other clusters.
    routes: Path | None = None
    # File for what the pool promises its jobs on the links, which the site's edge shapes.
    promises: Path | None = None
    worker_command: tuple[str, ...] = WORKER_COMMAND
    # CA certificate to trust instead of the system's.
    ca: Path | None = None
    # Folder for copies of the catalogue's versions; None: in the state folder.
    cache: Path | None = None
    # The site's own storage folder for job files (None: all sites share one file system).
    storage: Path | None = None
    # JSON file with access to other sites' storage, see `read_sources`.
    sources: Path | None = None
    # A person can press Ctrl-C: the first one saves running parts before the agent stops.
    interactive: bool = False
    # Files that no worker may read, such as that of the token.
    secrets: tuple[Path, ...] = ()
    # The owner agrees that this agent takes the place of the enrolled one.
    enrols: bool = False
    # The site's scheduler; the default runs workers as processes of this machine.
    site: SiteFile = field(default_factory=SiteFile)
    # What the owner lets pool jobs do.
    policy: OwnerPolicy = field(default_factory=OwnerPolicy)
    # Where the agent's own metrics are served: host, port, token; None: nowhere.
    metrics: tuple[str, int, str | None] | None = None
    # The pool that the cluster belongs to: its chips and links, by which parts are rendered.
    pool: Pool | None = None
    # The folder to which key files of the pool's crossings are relative: that of the pool file.
    pool_folder: Path = Path()
    # The decision centre of the network, where parts that are promised bandwidth get their paths; None: no party.
    centre: CentreAddress | None = None


@dataclass
class Backoff:
    """Exponential backoff from 0.2 s to 5 s, with random jitter of up to half."""

    rng: random.Random
    _next_s: float = _BACKOFF_MIN_S

    def next_wait_s(self) -> float:
        """Return the wait after another failure, in seconds."""
        wait_s = self._next_s * (1 - self.rng.random() / 2)
        self._next_s = min(self._next_s * 2, _BACKOFF_MAX_S)
        return wait_s

    def reset(self) -> None:
        """Reset to the shortest wait."""
        self._next_s = _BACKOFF_MIN_S


class AgentLoop:
    """The loop around the agent service and the sync client; `step` is one non-blocking iteration."""

    def __init__(
        self,
        service: AgentService,
        client: SyncClient,
        rng: random.Random,
        key: AgentKey | None = None,
        metrics: MetricsListener | None = None,
    ) -> None:
        self.service, self._client, self._key = service, client, key
        self._metrics, self._next_page_s, self._syncs = metrics, 0.0, SyncCounts()
        self._backoff = Backoff(rng)
        self._incarnation = uuid.UUID(int=rng.getrandbits(128), version=4).hex
        self._reported_parts: object = None
        self._next_report_s, self._disconnected = 0.0, False
        self.leaves = False
        """Whether the server has said that the site, which is empty, leaves the pool."""

    def step(self, now_s: float) -> float:
        """Poll, sync if due or if a part has changed, and return the seconds until the next step.

        What orders have changed is reported at once.
        """
        self.service.tick()
        if self._metrics is not None and now_s >= self._next_page_s:
            self._next_page_s = now_s + PAGE_INTERVAL_S
            self._metrics.show(self.service.figures(self._syncs))
        if now_s >= self._next_report_s or self._has_news():
            self._sync(now_s)
            if self._has_news():
                return 0.0
        pause_s = FAST_POLL_S if self.service.needs_fast_poll else POLL_S
        return max(0.0, min(pause_s, self._next_report_s - now_s))

    def _has_news(self) -> bool:
        """Return whether the server can learn of a change of a part."""
        return not self._disconnected and self.service.observed_parts() != self._reported_parts

    def _sync(self, now_s: float) -> None:
        try:
            if self._key is not None:
                self._key.renew_if_due(self._client)
            report, batch = self.service.report(self._incarnation)
            sent_s = time.monotonic()
            orders = self._exchange(report, batch)
            self._syncs.add_answer(time.monotonic() - sent_s, time.time())
            if self._key is not None:
                self._key.confirm()
        except UnavailableError as error:
            wait_s = self._backoff.next_wait_s()
            self._syncs.num_failed += 1
            if not self._disconnected:
                _log.warning("%s; retrying", error)
            self._disconnected, self._next_report_s = True, now_s + wait_s
            return
        if self._reported_parts is None:
            _log.info("cluster %s has joined the pool", self.service.cluster.name)
        elif self._disconnected:
            _log.info("connection to the server restored")
        self._backoff.reset()
        self._disconnected, self._reported_parts = False, report.parts
        self.service.outbox.acknowledge(batch)
        self.service.apply_orders(orders)
        self.leaves = orders.leaves
        quick = batch.full or self.service.needs_fast_poll
        self._next_report_s = now_s + (FAST_POLL_S if quick else orders.poll_after_s)

    def _exchange(self, report: AgentReport, batch: TelemetryBatch) -> AgentOrders:
        """Return the orders; a report that the server refuses is sent again without what workers have written.

        Workers run programs of users: what one of them writes must not end the agent of a site.
        """
        try:
            return self._client.sync(report)
        except InputError as error:
            if not batch.offsets:
                raise
            orders = self._client.sync(report.model_copy(update={"metrics": (), "logs": ()}))
            _log.error("the server refuses output of workers, which is dropped: %s", error)
            return orders

    def send_final_report(self) -> None:
        """Send a final report, without retry."""
        self._next_report_s = 0.0
        self._sync(0.0)


def run_agent(config: AgentConfig, stop: threading.Event | None = None) -> None:
    """Run the agent of one site until SIGINT, SIGTERM or `stop`, then stop all workers.

    If `config.interactive`, the first SIGINT lets the pool's parts save a checkpoint first, and the second ends that.
    Raises `InputError` if the storage folder does not exist or an account of the policy cannot be used;
    `UnavailableError` if the state folder cannot be used; `AuthError` or `ProtocolError` if the server rejects this
    agent (workers keep running for a later agent); `ConflictError` for a copied state folder (nothing in it is
    touched), or if another agent took the cluster over (after stopping the workers).
    """
    stop, at_once, wake = stop or threading.Event(), threading.Event(), threading.Event()
    check_rights(config.policy.workers)

    def on_stop(number: int, _frame: object) -> None:
        if stop.is_set() or number == signal.SIGTERM or not config.interactive:
            at_once.set()
        stop.set()
        wake.set()

    with (
        handled_stop_signals(on_stop),
        lock_state_folder(config.state, "agent"),
        SyncClient(config.server, config.token or "", config.cluster.name, config.ca) as exchange,
        ExitStack() as stack,
        crossings_started(config.pool, config.cluster.name, config.pool_folder, config.state, config.routes) as wan,
    ):
        key = None if config.token is not None else _load_key(config)
        if key is not None:
            exchange.use_token(key.token)
        host = resolve_host(config.host) if config.host else _own_address(config.server, stop)
        if host is None:
            return
        identity = open_identity(config.state, enrols=config.enrols)
        _log.info("workers of %s listen at %s, %s", config.cluster.name, host, _ports_text(config.ports))
        rights, fetcher = config.policy.workers, _file_fetcher(config)
        _log.info("%s", describe_isolation(rights, has_roots=bool(config.policy.storage.roots)))
        adapter = make_adapter(_site_context(config, host))
        shell = AgentService(
            cluster=use_found_topology(config.cluster, adapter),
            adapter=adapter,
            state=config.state,
            clock=boot_time_s,
            host=host,
            ports=config.ports,
            checks_peers=True,
            needs_keys=True,
            routes=wan.routes,
            promises=config.promises,
            policy=config.policy,
            fetcher=fetcher,
            versions=_version_fetcher(config, fetcher, exchange),
            identity=identity,
            containers=_worker_containers(config, adapter.capabilities),
            pool=config.pool,
            secrets=(*config.secrets, *wan.keys),
            on_answer=wake.set,
            centre=config.centre,
        )
        metrics = None if config.metrics is None else stack.enter_context(closing(MetricsListener(*config.metrics)))
        loop = AgentLoop(shell, exchange, random.SystemRandom(), key, metrics)
        try:
            while not stop.is_set() and not loop.leaves:
                wake.wait(loop.step(time.monotonic()))
                wake.clear()
        except ConflictError:
            stop_workers(loop, saves_first=False, at_once=at_once)
            raise
        stop_workers(loop, saves_first=config.interactive and not at_once.is_set(), at_once=at_once)
        loop.send_final_report()
        if loop.leaves:
            try:
                shell.adapter.leave()
            except UnavailableError as error:
                _log.warning("left at the scheduler: %s", error)
            _leave_pool(exchange, config.cluster.name, stop)


def _leave_pool(server: SyncClient, cluster: str, stop: threading.Event) -> None:
    """Report the end of the agent until the server answers, or `stop` is set."""
    backoff = Backoff(random.SystemRandom())
    while True:
        try:
            server.leave()
        except UnavailableError as error:
            _log.warning("%s; retrying", error)
        else:
            _log.info("cluster %s has left the pool", cluster)
            return
        if stop.wait(backoff.next_wait_s()):
            return


def _load_key(config: AgentConfig) -> AgentKey:
    """Return the key of the state folder; raise `AuthError` if it has none, or that of another cluster."""
    key = AgentKey.load(config.state, time.time)
    if key is None or key.site != config.cluster.name:
        raise AuthError(
            f"the state folder {config.state} has no key of cluster '{config.cluster.name}'",
            hint="join first: isthmus site join CODE --state DIR; or give a token of the owner with --token-file",
        )
    return key


def _worker_containers(config: AgentConfig, can: Capabilities) -> WorkerContainers | NodeContainers | None:
    """Return what makes the containers of the policy, None where there are none or the scheduler makes them."""
    rights = config.policy.workers
    if rights.containers is None:
        return None
    if not can.images:
        refuse_images(config.site.kind)
    check_containers(rights.containers, runs_them=can.containers == "agent")
    if can.containers == "scheduler":
        return None
    if can.node_images is not None:
        return NodeContainers(rights, can.node_images, config.state, config.worker_command)
    in_step = can.holds == "scheduler"
    return WorkerContainers(rights.containers, rights, config.state.absolute(), config.worker_command, in_step=in_step)


def _site_context(config: AgentConfig, host: str) -> SiteContext:
    config.site.check_cluster(config.cluster)
    return SiteContext(
        site=config.site,
        cluster=config.cluster,
        state=config.state.absolute(),
        worker_command=config.worker_command,
        host=host,
    )


def _own_address(server: str, stop: threading.Event) -> str | None:
    """Return this machine's address towards the server; wait for a route, None once `stop` is set."""
    backoff, warned = Backoff(random.SystemRandom()), False
    while not stop.is_set():
        try:
            return own_address(server)
        except UnavailableError as error:
            if not warned:
                _log.warning("%s; retrying", error)
            warned = True
        stop.wait(backoff.next_wait_s())
    return None


def _ports_text(ports: PortRange | None) -> str:
    return "at any free port" if ports is None else f"ports {ports[0]} to {ports[1]}"


def _file_fetcher(config: AgentConfig) -> FileFetcher | None:
    if config.storage is None:
        return None
    if not config.storage.is_dir():
        raise InputError(
            f"the storage folder {config.storage} does not exist", hint="create it, or mount the site's storage there"
        )
    return FileFetcher(config.storage.absolute(), read_sources(config.sources) if config.sources else {})


def _version_fetcher(config: AgentConfig, fetcher: FileFetcher | None, server: SyncClient) -> VersionFetcher:
    cache = VersionCache(config.cache or config.state / CACHE_FOLDER, config.policy.fetch.cache_bytes)
    storage = SiteStorage(config.policy.storage, fetcher.root if fetcher else None, cache)
    http = HttpReader(policy=config.policy.fetch)
    return VersionFetcher(cache, VersionSource(policy=config.policy.fetch, storage=storage, http=http), server.manifest)


def stop_workers(loop: AgentLoop, *, saves_first: bool, at_once: threading.Event) -> None:
    """Stop all workers and log what becomes of them; with `saves_first` save first, until `at_once` is set.

    After their grace and `STOP_MARGIN_S` the parts that still have processes are named.
    """
    service = loop.service
    num_parts, save_limit_s = service.num_running, service.policy.protect_s
    if num_parts and saves_first:
        text = "saving the running parts (%d) before the agent stops, at most %g s; Ctrl-C again stops at once"
        _log.warning(text, num_parts, save_limit_s)
    elif num_parts:
        _log.warning("stopping the running parts (%d); their jobs go on from their last checkpoints", num_parts)
    service.shut_down(saves_first=saves_first)
    deadline_s = time.monotonic() + service.stop_grace_s + STOP_MARGIN_S + (save_limit_s if saves_first else 0.0)
    while not service.stopped:
        if time.monotonic() > deadline_s:
            left = ", ".join(f"{part.job}/{part.attempt}" for part in service.machine.parts.values() if part.live)
            _log.error("processes of %s did not end in time: end them by hand", left)
            return
        if saves_first and at_once.is_set():
            saves_first = False
            _log.warning("stopping at once; the jobs go on from their last checkpoints")
            service.shut_down()
        try:
            pause_s = loop.step(time.monotonic()) if saves_first else FAST_POLL_S
        except IsthmusError as error:  # the server rejects this agent: nothing more can be agreed with it
            _log.warning("%s", error)
            at_once.set()
            continue
        time.sleep(min(pause_s, FAST_POLL_S))
        service.tick()
