"""`run_server`: the control plane as one process: state folder, store, service, network and shutdown."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from isthmus.control.rest.create_app import create_app
from isthmus.control.server.backup_file import open_stored_log
from isthmus.control.server.connection_limits import ConnectionLimits, caps_within
from isthmus.control.server.file_limit import raise_file_limit
from isthmus.control.server.gc_tuning import tune_gc
from isthmus.control.server.guarded_protocol import make_protocol_factory
from isthmus.control.server.head_refusal import MAX_HEAD_BYTES
from isthmus.control.server.limited_listener import LimitedListener
from isthmus.control.server.listen_addresses import certificate_hosts, printed_hosts
from isthmus.control.server.log_archive import archive_events
from isthmus.control.server.log_end_file import AuditEndFile, LogEndFile
from isthmus.control.server.server_config import ServerConfig, open_provider, open_store, read_database_address
from isthmus.control.server.tls import Certificate, given_certificate, self_signed_certificate
from isthmus.control.service.access.token_gate import TokenGate
from isthmus.control.service.auth import ADMIN_TOKEN_FILE, ensure_admin_token
from isthmus.control.service.control_service import ControlService
from isthmus.control.service.planner_process import COMMAND, PlannerPool, PlannerProcess
from isthmus.control.service.planner_queue import Planner
from isthmus.control.store.leader_election import LeaderElection
from isthmus.control.store.log_base import LogBase
from isthmus.control.store.snapshot_file import SnapshotFile
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.control.store.store_interface import Store
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.loopback import is_loopback
from isthmus.core.messages.switch_keys import read_switch_secret
from isthmus.core.process.gc_pause import collection_paused
from isthmus.core.process.state_folder_lock import lock_state_folder
from isthmus.core.process.stop_signals import handled_stop_signals

__all__ = ["ServerConfig", "ServerInfo", "create_app", "run_server"]


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """A listening server: its URL, certificate and admin token file."""

    url: str
    # Its URLs at other addresses of this machine.
    other_urls: tuple[str, ...] = ()
    # None: plain HTTP.
    certificate: Certificate | None
    # None if another server on the same database has created the token.
    admin_token: Path | None


def run_server(
    config: ServerConfig,
    announce: Callable[[ServerInfo], None] | None = None,
    *,
    stop: threading.Event | None = None,
    make_store: Callable[[ServerConfig], Store] | None = None,
    planner: Planner | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or `stop`.

    `announce` is called once connections are accepted; `make_store` and `planner` replace the built-in ones.
    Raises `UnavailableError` if the port, the state folder or the database is unavailable, and `InputError`
    if TLS files or the database address are missing or invalid.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_bind_listener(config.host, config.port))
        stack.enter_context(lock_state_folder(config.state, "server"))
        certificate = load_certificate(config)
        switch_secret = read_switch_secret(config.switch_key) if config.switch_key is not None else None
        store = (make_store or open_store)(config)
        stack.callback(store.close)
        log_end = LogEndFile(config.state)
        if isinstance(store, SqlQueries):
            stack.callback(log_end.close)
            log_end.follow(store)
            audit_end = AuditEndFile(config.state)
            stack.callback(audit_end.close)
            audit_end.follow(store)
        ensure_admin_token(store, config.state, time.time())
        own = PlannerPool(make_process=lambda: PlannerProcess(command=(*COMMAND, str(config.search_cpu_s))))
        leadership = _leader_election(config)
        with collection_paused():
            service = ControlService(
                store,
                config.pool,
                planner=planner or own,
                num_planners=len(own.processes) if planner is None else 1,
                quotas=config.quotas,
                notify=config.notify,
                switch_secret=switch_secret,
                oidc=open_provider(config),
                rules=config.rules,
                leader_election=leadership,
                snapshot_file=SnapshotFile(config.state),
                compaction=config.compaction,
                before_compaction=functools.partial(_prepare_compaction, config, log_end),
            )
            tune_gc()  # after the replay: its records are long-lived
        if certificate is not None:
            text = "When the certificate of the server ends."
            service.fixed_gauges["isthmus_certificate_expiry_timestamp_seconds"] = (text, certificate.expires_s)
        stack.callback(service.close)
        stack.callback(own.close)
        service.start()
        token = config.state / ADMIN_TOKEN_FILE
        urls = _listener_urls(config.host, listener, certificate)
        listening = ServerInfo(
            url=urls[0],
            other_urls=urls[1:],
            certificate=certificate,
            admin_token=token if token.exists() else None,
        )
        limits = ConnectionLimits(config.connections or caps_within(raise_file_limit()))
        server = _UvicornServer(_uvicorn_config(service, certificate), stop or threading.Event(), service.gate, limits)
        server.on_ready = lambda: announce(listening) if announce else None
        server.on_shutdown = service.changes.close
        server.run(sockets=[listener])


def _prepare_compaction(config: ServerConfig, log_end: LogEndFile, base: LogBase) -> None:
    """Copy the events that a base will replace to the archive, and put the end of the log on disk."""
    if config.archive is not None:
        with open_stored_log(config) as log:
            archive_events(log, base.end, config.archive, config.archive_bytes)
    log_end.flush()


def load_certificate(config: ServerConfig) -> Certificate | None:
    """Return the server's certificate, None for plain HTTP on loopback; raise `InputError` otherwise."""
    if config.tls_cert is not None and config.tls_key is not None:
        return given_certificate(config.tls_cert, config.tls_key)
    if config.tls_cert is not None or config.tls_key is not None:
        raise InputError("TLS needs both a certificate and its key", hint="give both files")
    if config.self_signed:
        hosts = certificate_hosts(config.host)
        return self_signed_certificate(config.state / "tls", hosts, datetime.datetime.now(datetime.UTC))
    if not is_loopback(config.host):
        raise InputError(
            f"{config.host} is reachable from other machines and TLS is not configured",
            hint="give a certificate and its key, use a self-signed one, or bind 127.0.0.1",
        )
    return None


def _leader_election(config: ServerConfig) -> LeaderElection | None:
    if config.database is None:
        return None
    from isthmus.control.store.postgres_leader_election import PostgresLeaderElection

    return PostgresLeaderElection(read_database_address(config.database))


@contextlib.contextmanager
def _bind_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a listening socket; raise `UnavailableError` if the address is unavailable."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio disables Nagle's algorithm, which would delay each response by 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
                hint="choose a free address of this machine: --host, --port (0 takes any free port)",
            ) from error
        yield listener


def _listener_urls(host: str, listener: socket.socket, certificate: Certificate | None) -> tuple[str, ...]:
    """Return the server's URLs, the one to give to other machines first."""
    scheme, port = "http" if certificate is None else "https", listener.getsockname()[1]
    hosts = printed_hosts(host, certificate.hosts if certificate else None)
    return tuple(f"{scheme}://[{one}]:{port}" if ":" in one else f"{scheme}://{one}:{port}" for one in hosts)


def _uvicorn_config(service: ControlService, certificate: Certificate | None) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        ssl_certfile=certificate.cert if certificate else None,
        ssl_keyfile=certificate.key if certificate else None,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=3,
        server_header=False,
        # No proxy is trusted: limits and the audit log count by the address of the connection.
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ws="none",
        backlog=4096,
    )


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that returns on SIGINT, SIGTERM or `stop`, so that its caller can clean up."""

    on_ready: Callable[[], None]
    on_shutdown: Callable[[], None]

    def __init__(
        self, config: uvicorn.Config, stop: threading.Event, gate: TokenGate, limits: ConnectionLimits
    ) -> None:
        super().__init__(config)
        self._stop, self._gate, self._limits = stop, gate, limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections within the limits, then call `on_ready`."""
        config = self.config
        make = make_protocol_factory(config, self.server_state, self._gate, self._limits, time.monotonic)
        self.servers: list[Any] = [
            LimitedListener(listener, self._limits, self._gate, make, tls=config.ssl, backlog=config.backlog)
            for listener in sockets or ()
        ]
        self.started = True
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End event streams first, so that shutdown does not wait for them."""
        self.on_shutdown()
        await super().shutdown(sockets=sockets)

    async def on_tick(self, counter: int) -> bool:
        """Check the stop event; uvicorn calls this ten times a second."""
        return self._stop.is_set() or await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop the server on SIGINT and SIGTERM; restore the previous handlers afterwards."""
        with handled_stop_signals(self.handle_exit):
            yield
