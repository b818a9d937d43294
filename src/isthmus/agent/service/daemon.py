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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.agent.adapters.local import WORKER_COMMAND, LocalAdapter
from isthmus.agent.service.agent_service import AgentShell
from isthmus.agent.service.fetches import Fetches
from isthmus.agent.service.file_transfer import read_sources
from isthmus.agent.service.sync_client import Exchange
from isthmus.core.errors import ConflictError, UnavailableError
from isthmus.core.policy import OwnerPolicy
from isthmus.core.pool import Cluster
from isthmus.core.state_folder import locked

QUICK_S = 0.05
"""Poll and sync interval while a part is about to change."""

LOOK_S = 0.2
"""Poll interval for workers otherwise."""

_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 0.2, 5.0

_log = logging.getLogger("isthmus.agent")


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Configuration of one site's agent."""

    # URL of the control plane.
    server: str
    # Token of the cluster's owner.
    token: str
    cluster: Cluster
    # Folder that persists across restarts.
    state: Path
    # Address where the site's workers listen.
    host: str = "127.0.0.1"
    # JSON file `{cluster: {other: "host:port"}}` of proxies to other clusters.
    routes: Path | None = None
    worker_command: tuple[str, ...] = WORKER_COMMAND
    # CA certificate to trust instead of the system's.
    ca: Path | None = None
    # The site's own storage folder for job files (None: all sites share one file system).
    storage: Path | None = None
    # JSON file with access to other sites' storage, see `read_sources`.
    sources: Path | None = None
    # What the owner lets pool jobs do.
    policy: OwnerPolicy = field(default_factory=OwnerPolicy)


@dataclass
class Backoff:
    """Exponential backoff from 0.2 s to 5 s, with random jitter of up to half."""

    randomness: random.Random
    _next_s: float = _BACKOFF_FIRST_S

    def failed(self) -> float:
        """Return the wait after another failure, in seconds."""
        wait_s = self._next_s * (1 - self.randomness.random() / 2)
        self._next_s = min(self._next_s * 2, _BACKOFF_MOST_S)
        return wait_s

    def succeeded(self) -> None:
        """Reset to the shortest wait."""
        self._next_s = _BACKOFF_FIRST_S


class AgentLoop:
    """The loop around the agent service and the sync client; `step` is one non-blocking iteration."""

    def __init__(self, shell: AgentShell, exchange: Exchange, randomness: random.Random) -> None:
        self.shell, self._exchange = shell, exchange
        self._backoff = Backoff(randomness)
        self._incarnation = uuid.UUID(int=randomness.getrandbits(128), version=4).hex
        self._told: object = None
        self._report_at_s, self._alone = 0.0, False

    def step(self, now_s: float) -> float:
        """Poll, sync if due or if a part has changed, and return the seconds until the next step."""
        self.shell.tick()
        observed = self.shell.machine.observed()
        if now_s >= self._report_at_s or (observed != self._told and not self._alone):
            self._report(now_s)
        pause_s = QUICK_S if self.shell.busy else LOOK_S
        return max(0.0, min(pause_s, self._report_at_s - now_s))

    def _report(self, now_s: float) -> None:
        try:
            report, batch = self.shell.report(self._incarnation)
            orders = self._exchange.sync(report)
        except UnavailableError as error:
            wait_s = self._backoff.failed()
            if not self._alone:
                _log.warning("%s; retrying", error)
            self._alone, self._report_at_s = True, now_s + wait_s
            return
        if self._told is None:
            _log.info("cluster %s has joined the pool", self.shell.cluster.name)
        elif self._alone:
            _log.info("connection to the server restored")
        self._backoff.succeeded()
        self._alone, self._told = False, report.parts
        self.shell.outbox.stored(batch)
        self.shell.obey(orders)
        quick = batch.full or self.shell.busy
        self._report_at_s = now_s + (QUICK_S if quick else orders.poll_after_s)

    def last_report(self) -> None:
        """Send a final report, without retry."""
        self._report_at_s = 0.0
        self._report(0.0)


def run_agent(config: AgentConfig, stop: threading.Event | None = None) -> None:
    """Run the agent of one site until SIGINT, SIGTERM or `stop`, then stop all workers.

    Raises `UnavailableError` if the state folder cannot be used; `AuthError` or `ProtocolError` if the server
    rejects this agent (workers keep running for a later agent); `ConflictError` if another agent took the
    cluster over (after stopping the workers).
    """
    stop = stop or threading.Event()
    with (
        _stopped_by_signals(stop),
        locked(config.state, "agent"),
        Exchange(config.server, config.token, config.cluster.name, config.ca) as exchange,
    ):
        shell = AgentShell(
            cluster=config.cluster,
            adapter=LocalAdapter(config.cluster, config.state / "queue", config.worker_command),
            state=config.state,
            clock=time.monotonic,
            host=config.host,
            routes=config.routes,
            policy=config.policy,
            fetches=_fetches(config),
        )
        loop = AgentLoop(shell, exchange, random.SystemRandom())
        try:
            while not stop.is_set():
                stop.wait(loop.step(time.monotonic()))
        except ConflictError:
            _end(shell)
            raise
        _end(shell)
        loop.last_report()


def _fetches(config: AgentConfig) -> Fetches | None:
    if config.storage is None:
        return None
    return Fetches(config.storage.absolute(), read_sources(config.sources) if config.sources else {})


def _end(shell: AgentShell) -> None:
    shell.shut_down()
    while not shell.ended:
        time.sleep(QUICK_S)
        shell.tick()


@contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on SIGINT and SIGTERM; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
