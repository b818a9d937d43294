"""`SqliteStore`: the embedded store, one SQLite file in WAL mode, flushed before each acknowledgement.

Concurrent writes share a flush (`group_commit`). A lock on `FILE.lock` keeps other servers out.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from isthmus.control.state.events import Event, NoticeDue, encode_event
from isthmus.control.store.group_commit import GroupCommit
from isthmus.control.store.log_chain import (
    LogEnd,
    OtherStoreError,
    chain_rows,
    chain_start,
    link_rows,
    new_store_id,
)
from isthmus.control.store.sql_queries import PAGE_SIZE, SqlQueries
from isthmus.control.store.store_interface import LogMovedError
from isthmus.control.store.tables.audit_queries import AUDIT_FIELDS, chain_lines
from isthmus.core.errors import InputError, IsthmusError, ProtocolError, UnavailableError
from isthmus.core.views.access_views import AuditRecord
from isthmus.core.views.audit_chain import AuditEnd

MIGRATIONS = (
    """
    CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL);
    CREATE TABLE metrics (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        job TEXT NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, step INTEGER NOT NULL,
        body TEXT NOT NULL, UNIQUE (job, attempt, rank, step)
    );
    CREATE INDEX metrics_of_job ON metrics (job, number);
    CREATE TABLE logs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        job TEXT NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL,
        start INTEGER NOT NULL, stop INTEGER NOT NULL, body TEXT NOT NULL
    );
    CREATE INDEX logs_of_job ON logs (job, number);
    CREATE INDEX logs_of_rank ON logs (job, attempt, rank, stop);
    CREATE TABLE tokens (
        digest TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, created_s REAL NOT NULL
    );
    """,
    """
    ALTER TABLE events ADD COLUMN hash BLOB;
    CREATE TABLE identity (one INTEGER PRIMARY KEY CHECK (one = 1), store TEXT NOT NULL);
    """,
    "CREATE TABLE secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """
    ALTER TABLE tokens ADD COLUMN expires_s REAL;
    ALTER TABLE tokens ADD COLUMN revoked_s REAL;
    ALTER TABLE tokens ADD COLUMN created_by TEXT NOT NULL DEFAULT '';
    CREATE TABLE audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, action TEXT NOT NULL, actor TEXT NOT NULL,
        role TEXT NOT NULL, token TEXT NOT NULL, address TEXT NOT NULL, subject TEXT NOT NULL, detail TEXT NOT NULL
    );
    CREATE TRIGGER audit_unchanged BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
    CREATE TRIGGER audit_kept BEFORE DELETE ON audit WHEN old.at_s > strftime('%s', 'now') - 86400 * 365
    BEGIN SELECT RAISE(ABORT, 'the audit log keeps its records for 365 days'); END;
    """,
    """
    CREATE TABLE bases (
        number INTEGER PRIMARY KEY, hash BLOB NOT NULL, made_s REAL NOT NULL, active INTEGER NOT NULL,
        body BLOB NOT NULL
    );
    """,
    "ALTER TABLE tokens ADD COLUMN high INTEGER NOT NULL DEFAULT 0",
    """
    ALTER TABLE tokens ADD COLUMN site TEXT NOT NULL DEFAULT '';
    ALTER TABLE tokens ADD COLUMN replaces TEXT NOT NULL DEFAULT '';
    """,
    "ALTER TABLE tokens ADD COLUMN session_of TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE audit ADD COLUMN hash TEXT NOT NULL DEFAULT ''",
    "CREATE TABLE notices (number INTEGER PRIMARY KEY AUTOINCREMENT, batch INTEGER NOT NULL, body TEXT NOT NULL)",
)
"""Migrations from each schema version to the next; the first one creates version 1."""
AUDIT_CHAINED_VERSION = 9
"""The version that chains the audit log; later ones never do it again, or a forged row could be chained."""

WriteFunction = Callable[[sqlite3.Connection], Any]


class SqliteStore(SqlQueries[sqlite3.Connection]):
    """A `Store` in the file `path`, created with mode 0600 if missing.

    `busy_timeout_s` is how long a write waits while another program locks the file. A new file gets the identity
    `new_id`, random by default.

    Raises `UnavailableError` if the file cannot be locked or written, `ProtocolError` if a newer version of isthmus has
    migrated it, and `OtherStoreError` if its identity is not `expected_id`.
    """

    shared = False

    def __init__(
        self,
        path: str | Path,
        *,
        busy_timeout_s: float = 5.0,
        expected_id: str | None = None,
        new_id: str | None = None,
    ) -> None:
        self._initialize()
        self.path, self._busy_timeout_s = Path(path), busy_timeout_s
        self.group_commit = GroupCommit[sqlite3.Connection](self._commit, data_errors=(OverflowError, LogMovedError))
        self._read_lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._lock_file = self._lock_store_file()
        try:
            with self._translate_errors():
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
                self.path.chmod(0o600)
                self.writer, self._reader = self._connect(), self._connect()
            self.store_id = self._write(lambda db: _migrate(db, expected_id, new_id or new_store_id()))
        except BaseException:
            self.close()
            raise

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        """Append events; see `Store`."""
        bodies = [encode_event(event) for event in events]

        def write(db: sqlite3.Connection) -> tuple[LogEnd, AuditEnd | None]:
            found = db.execute("SELECT number, hash FROM events ORDER BY number DESC LIMIT 1").fetchone()
            end = LogEnd(*found) if found else self._first_end()
            self._require_known(end)
            if expected_last is not None and end.number != expected_last:
                raise LogMovedError(expected_last, end.number)
            rows = link_rows(end, bodies)
            db.executemany("INSERT INTO events (number, body, hash) VALUES (?, ?, ?)", rows)
            audit_end = self._append_lines(db, audit)
            self._append_notices(db, notices)
            return LogEnd(rows[-1][0], rows[-1][2]) if rows else end, audit_end

        end, audit_end = self._write(write)
        self._remember_end(end)
        self._remember_audit(audit_end)
        return int(end.number)

    def exclusive_access(self) -> AbstractContextManager[None]:
        """Do nothing: the lock on the file excludes other servers."""
        return nullcontext()

    def close(self) -> None:
        """Close the file and release its lock; see `Store`."""
        with self.group_commit.lock, self._read_lock:
            for connection in self._connections:
                connection.close()
            self._lock_file.close()

    def _lock_store_file(self) -> Any:
        """Lock the file for this server."""
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            file = os.fdopen(os.open(lock, os.O_CREAT | os.O_RDWR, 0o600), "w")
        except OSError as error:
            raise self._store_error(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise UnavailableError(
                f"{self.path} is in use by another server", hint="stop that server, or use another store"
            ) from error
        return file

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=self._busy_timeout_s, check_same_thread=False, isolation_level=None)
        self._connections.append(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        return db

    def _read(self, sql: str, *values: Any) -> list[Any]:
        with self._read_lock, self._translate_errors():
            return self._reader.execute(sql, values).fetchall()

    def _write(self, write: WriteFunction) -> Any:
        with self._translate_errors():
            return self.group_commit.write(write)

    def _execute(self, session: sqlite3.Connection, sql: str, *values: Any) -> Any:
        return session.execute(sql, values)

    def _execute_many(self, session: sqlite3.Connection, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        session.executemany(sql, rows)

    def _lock_audit(self, session: sqlite3.Connection) -> None:
        """Do nothing: a write transaction excludes others."""

    def _encode_log(self, text: str) -> str:
        return text

    def _commit(self, writes: Sequence[WriteFunction]) -> list[Any]:
        """Run writes in one transaction; if one fails, roll back all."""
        self.writer.execute("BEGIN IMMEDIATE")
        try:
            results = [write(self.writer) for write in writes]
            self.writer.execute("COMMIT")
        except BaseException:
            if self.writer.in_transaction:
                self.writer.execute("ROLLBACK")
            raise
        return results

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of SQLite and the operating system into an error that names the file."""
        try:
            yield
        except (sqlite3.Error, OSError, OverflowError) as error:
            raise self._store_error(error) from error

    def _store_error(self, error: Exception) -> IsthmusError:
        if isinstance(error, OverflowError):
            return InputError(f"a number is too large to be stored: {error}", hint="the largest is 2^63 - 1")
        return UnavailableError(
            f"the store {self.path} cannot be used: {error}",
            hint="check the path, its permissions and the space left on its disk",
        )


def _migrate(db: sqlite3.Connection, expected_id: str | None, new_id: str) -> str:
    """Migrate the schema and return the store's identity.

    Raises `OtherStoreError` for another identity than `expected_id` (before any change), and `ProtocolError` if the
    schema is newer than this version of isthmus supports.
    """
    if expected_id is not None and (found := _identity(db)) != expected_id:
        raise OtherStoreError(expected_id, found)
    db.execute(
        "CREATE TABLE IF NOT EXISTS migrations "
        "(version INTEGER PRIMARY KEY, applied TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)"
    )
    present = db.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()[0]
    if present > len(MIGRATIONS):
        raise ProtocolError(
            f"the store has schema version {present}; this server supports versions up to {len(MIGRATIONS)}",
            hint="start the version of isthmus that wrote it, or a newer one",
        )
    for version, script in enumerate(MIGRATIONS[present:], start=present + 1):
        for statement in _statements(script):
            db.execute(statement)
        db.execute("INSERT INTO migrations (version) VALUES (?)", (version,))
    known = _identity(db)
    if present < AUDIT_CHAINED_VERSION:
        _chain_audit(db, known or new_id)
    if known is None:
        db.execute("INSERT INTO identity VALUES (1, ?)", (new_id,))
        page = "SELECT number, body FROM events WHERE number > ? ORDER BY number LIMIT ?"
        chain_rows(
            chain_start(new_id),
            lambda after: db.execute(page, (after, PAGE_SIZE)).fetchall(),
            lambda rows: db.executemany("UPDATE events SET hash = ? WHERE number = ?", rows),
        )
    return known or new_id


def _chain_audit(db: sqlite3.Connection, store_id: str) -> None:
    """Add the hashes to an audit log of an earlier version, whose rows a trigger protects."""
    db.execute("DROP TRIGGER audit_unchanged")
    rows = db.execute(f"SELECT {', '.join(AUDIT_FIELDS[:-1])} FROM audit ORDER BY number").fetchall()  # noqa: S608
    db.executemany("UPDATE audit SET hash = ? WHERE number = ?", chain_lines(store_id, rows))
    db.execute(
        "CREATE TRIGGER audit_unchanged BEFORE UPDATE ON audit "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
    )


def _identity(db: sqlite3.Connection) -> str | None:
    """Return the identity of the store, None for a new file and one of an earlier version."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'identity'").fetchone():
        return None
    found = db.execute("SELECT store FROM identity").fetchone()
    return str(found[0]) if found else None


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script; that of a trigger contains others."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
