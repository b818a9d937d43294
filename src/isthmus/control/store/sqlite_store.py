"""`SqliteStore`: the embedded store, one SQLite file in WAL mode, flushed before each acknowledgement.

Concurrent writes share a flush (`group_commit`). A lock on `FILE.lock` keeps other servers out.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from isthmus.control.state.events import Event, decode_event, encode_event
from isthmus.control.store.group_commit import GroupCommit
from isthmus.control.store.store_interface import LogMovedError, StoredToken, trim_stored_bytes
from isthmus.core.errors import InputError, IsthmusError, ProtocolError, UnavailableError
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.api_views import LogPage, MetricsPage

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
)
"""Migrations from each schema version to the next; the first one creates version 1."""

PAGE_SIZE = 1000
WriteFunction = Callable[[sqlite3.Connection], Any]


class SqliteStore:
    """A `Store` in the file `path`, created with mode 0600 if missing.

    `busy_timeout_s` is how long a write waits while another program locks the file.

    Raises `UnavailableError` if the file cannot be locked or written, and `ProtocolError` if a newer version
    of isthmus has migrated it.
    """

    shared = False

    def __init__(self, path: str | Path, *, busy_timeout_s: float = 5.0) -> None:
        self.path, self._busy_timeout_s = Path(path), busy_timeout_s
        self._group_commit = GroupCommit[sqlite3.Connection](self._commit, data_errors=(OverflowError, LogMovedError))
        self._read_lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._lock_file = self._lock_store_file()
        try:
            with self._translate_errors():
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
                self.path.chmod(0o600)
                self._writer, self._reader = self._connect(), self._connect()
            self._write(_migrate)
        except BaseException:
            self.close()
            raise

    def append(self, events: Sequence[Event], expected_last: int | None = None) -> int:
        """Append events; see `Store`."""
        bodies = [encode_event(event) for event in events]

        def write(db: sqlite3.Connection) -> int:
            last = int(db.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()[0])
            if expected_last is not None and last != expected_last:
                raise LogMovedError(expected_last, last)
            rows = enumerate(bodies, start=last + 1)
            db.executemany("INSERT INTO events (number, body) VALUES (?, ?)", rows)
            return last + len(bodies)

        return int(self._write(write))

    def exclusive_access(self) -> AbstractContextManager[None]:
        """Do nothing: the lock on the file excludes other servers."""
        return nullcontext()

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield events; see `Store`."""
        while True:
            rows = self._read(
                "SELECT number, body FROM events WHERE number > ? ORDER BY number LIMIT ?", after, PAGE_SIZE
            )
            for number, body in rows:
                yield number, decode_event(body)
            if len(rows) < PAGE_SIZE:
                return
            after = rows[-1][0]

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Store metrics; see `Store`."""
        rows = [(one.job, one.attempt, one.rank, one.step, one.model_dump_json()) for one in metrics]
        sql = "INSERT OR IGNORE INTO metrics (job, attempt, rank, step, body) VALUES (?, ?, ?, ?, ?)"
        self._write(lambda db: db.executemany(sql, rows))

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000) -> MetricsPage:
        """Return metrics; see `Store`."""
        sql = "SELECT number, body FROM metrics WHERE job = ? AND number > ? ORDER BY number LIMIT ?"
        rows = self._read(sql, job_id, after, limit)
        found = tuple(StepMetrics.model_validate_json(body) for _, body in rows)
        return MetricsPage(metrics=found, next=rows[-1][0] if rows else after)

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Store log text; see `Store`."""

        def write(db: sqlite3.Connection) -> None:
            for chunk in chunks:
                of_rank = (chunk.job, chunk.attempt, chunk.rank)
                sql = "SELECT coalesce(max(stop), 0) FROM logs WHERE job = ? AND attempt = ? AND rank = ?"
                fresh = trim_stored_bytes(chunk, db.execute(sql, of_rank).fetchone()[0])
                if fresh is not None:
                    stop = fresh.offset + len(fresh.text.encode("utf-8"))
                    sql = "INSERT INTO logs (job, attempt, rank, start, stop, body) VALUES (?, ?, ?, ?, ?, ?)"
                    db.execute(sql, (*of_rank, fresh.offset, stop, fresh.text))

        self._write(write)

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return log text; see `Store`."""
        sql = (
            "SELECT number, job, attempt, rank, start, body FROM logs "
            "WHERE job = ? AND number > ? AND (? IS NULL OR rank = ?) ORDER BY number LIMIT ?"
        )
        rows = self._read(sql, job_id, after, rank, rank, limit)
        chunks = tuple(
            LogChunk(job=job, attempt=attempt, rank=of, offset=start, text=body)
            for _, job, attempt, of, start, body in rows
        )
        return LogPage(chunks=chunks, next=rows[-1][0] if rows else after)

    def delete_job_output(self, job_id: str) -> None:
        """Delete a job's metrics and logs; see `Store`."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM metrics WHERE job = ?", (job_id,))
            db.execute("DELETE FROM logs WHERE job = ?", (job_id,))

        self._write(write)

    def put_token(self, token: StoredToken) -> None:
        """Store a token; see `Store`."""
        row = (token.digest, token.role, token.name, token.created_s)
        sql = "INSERT OR REPLACE INTO tokens (digest, role, name, created_s) VALUES (?, ?, ?, ?)"
        self._write(lambda db: db.execute(sql, row))

    def find_token(self, digest: str) -> StoredToken | None:
        """Return a token; see `Store`."""
        rows = self._read("SELECT digest, role, name, created_s FROM tokens WHERE digest = ?", digest)
        return _token(rows[0]) if rows else None

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token; see `Store`."""
        rows = self._read("SELECT digest, role, name, created_s FROM tokens ORDER BY created_s")
        return tuple(_token(row) for row in rows)

    def close(self) -> None:
        """Close the file and release its lock; see `Store`."""
        with self._group_commit.lock, self._read_lock:
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
            return self._group_commit.write(write)

    def _commit(self, writes: Sequence[WriteFunction]) -> list[Any]:
        """Run writes in one transaction; if one fails, roll back all."""
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            results = [write(self._writer) for write in writes]
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
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


def _migrate(db: sqlite3.Connection) -> None:
    """Migrate the schema; raise `ProtocolError` if it is newer than this version of isthmus supports."""
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
        for statement in script.split(";"):
            db.execute(statement)
        db.execute("INSERT INTO migrations (version) VALUES (?)", (version,))


def _token(row: tuple[str, str, str, float]) -> StoredToken:
    digest, role, name, created_s = row
    return StoredToken(digest=digest, role=role, name=name, created_s=created_s)
