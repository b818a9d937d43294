"""`ServerConfig`, the configuration of one server, and `open_store`, which opens its database."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from isthmus.control.algorithms.compaction_policy import CompactionPolicy
from isthmus.control.queries.quotas import Quotas
from isthmus.control.server.connection_limits import ConnectionCaps
from isthmus.control.server.log_end_file import LogEndFile
from isthmus.control.service.notify.notify_settings import NotifySettings
from isthmus.control.service.oidc.oidc_provider import OidcProvider
from isthmus.control.service.planner_process import SEARCH_CPU_S
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import Store
from isthmus.core.bounded_file import read_within
from isthmus.core.errors import InputError
from isthmus.core.owner.oidc_file import OidcFile
from isthmus.core.pool import Pool

DATABASE_FILE = "isthmus.db"
"""Name of the SQLite file in the state folder."""
MAX_SECRET_BYTES = 4096
"""Largest file with the secret of the server's client at a provider."""
MAX_ADDRESS_BYTES = 4096
"""Largest file with the address of a database."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Configuration of one server. On any host but loopback TLS is required."""

    # State folder.
    state: Path
    host: str = "127.0.0.1"
    # 0 takes any free port.
    port: int = 8470
    # The operator's pool file: links, owners and chip definitions.
    pool: Pool | None = None
    # File with the address of a PostgreSQL database, which servers may share. None: SQLite in `state`.
    database: Path | None = None
    # Certificate and key as PEM files, or `self_signed` to generate them.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    self_signed: bool = False
    # Timeouts and intervals of the coordinator.
    rules: CoordinatorConfig | None = None
    # Limits of connections. None: as many as the process may open files for.
    connections: ConnectionCaps | None = None
    # File with the secret from which the keys of jobs at the pool's switches are derived. None: they have none.
    switch_key: Path | None = None
    # The provider by which persons sign in to the console. None: they sign in with tokens.
    oidc: OidcFile | None = None
    # What one user or owner may ask for.
    quotas: Quotas = field(default_factory=Quotas)
    # How much of the event log is kept.
    compaction: CompactionPolicy = field(default_factory=CompactionPolicy)
    # Folder for a copy of the events that compaction drops. None: no copy.
    archive: Path | None = None
    # Size from which the oldest files of that folder are removed. None: all stay.
    archive_bytes: int | None = None
    # What the operator allows notices: networks of webhooks, a mail server.
    notify: NotifySettings = field(default_factory=NotifySettings)
    # CPU time of a search for plans, in seconds; then the best plans so far are the answer.
    search_cpu_s: float = SEARCH_CPU_S


def open_store(config: ServerConfig) -> Store:
    """Open the PostgreSQL database of `config`, or else the SQLite file in its state folder.

    Raises `OtherStoreError` for a database that is not the one the state folder has belonged to.
    """
    expected_id = LogEndFile(config.state).store_id
    if config.database is None:
        return SqliteStore(config.state / DATABASE_FILE, expected_id=expected_id)
    from isthmus.control.store.postgres_store import PostgresStore

    return PostgresStore(read_database_address(config.database), expected_id=expected_id)


def read_database_address(file: Path) -> str:
    """Return the database address in `file`, which is one line; raise `InputError` otherwise."""
    try:
        address = read_within(file, MAX_ADDRESS_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the database address cannot be read from {file}: {error}") from error
    if not address or "\n" in address:
        raise InputError(
            f"{file} does not contain the address of a database",
            hint="one line, for example postgresql://isthmus:PASSWORD@db.example/isthmus",
        )
    return address


def open_provider(config: ServerConfig) -> OidcProvider | None:
    """Return the provider of `config` with the secret of its file; raise `InputError` if that cannot be read."""
    if config.oidc is None:
        return None
    file = config.oidc.client_secret_file
    if file is None:
        return OidcProvider(config.oidc)
    try:
        secret = read_within(file, MAX_SECRET_BYTES).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"client_secret_file: {file} cannot be read: {error}") from error
    if not secret or "\n" in secret:
        raise InputError(f"client_secret_file: {file} does not contain a secret", hint="one line")
    return OidcProvider(config.oidc, secret)
