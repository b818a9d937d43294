"""`PostgresStore`: a store that several servers share, a PostgreSQL database accessed through psycopg 3.

The log has one writer at a time: a `exclusive_access` holds an advisory lock for one transaction, so the lock of a
server that dies is released at once, and that of one that hangs after `TRANSACTION_IDLE_LIMIT_S`. Every append also
checks the expected event number, so a server that has lost its lock cannot append. Lost connections are reopened. The
address may contain a password; it never appears in messages, logs or the process list.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from isthmus.control.state.events import Event, decode_event, encode_event
from isthmus.control.store.group_commit import GroupCommit
from isthmus.control.store.postgres_schema import migrate
from isthmus.control.store.store_interface import (
    LogMovedError,
    StoredToken,
    chunk_end_bytes,
    trim_stored_bytes,
)
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.api_views import LogPage, MetricsPage

EVENT_LOG_LOCK = 0x15_7468_6D75_7301
"""Advisory lock for appending events."""
OUTPUT_LOCK = 0x15_7468_6D75_7302
"""Advisory lock for writing metrics and logs: rows become visible in the order of their numbers."""
TRANSACTION_IDLE_LIMIT_S = 10
"""Seconds after which the database ends an idle transaction, and with it a server's turn."""
PAGE_SIZE = 1000
Connection = psycopg.Connection[Any]


class PostgresSession:
    """One connection to the database at `address`, opened at first use and reopened after a loss."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._db: Connection | None = None
        self.lock = threading.RLock()

    def __repr__(self) -> str:
        return "Session(...)"

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lock the connection; psycopg's errors become `UnavailableError` and `InputError`."""
        with self.lock:
            try:
                yield self._open()
            except (psycopg.DataError, OverflowError) as error:
                raise InputError(f"this cannot be stored: {error}") from error
            except psycopg.Error as error:
                if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                    self.close()
                raise UnavailableError(
                    f"the PostgreSQL database cannot be used: {str(error).strip()}",
                    hint="check that the database runs and that the file with its address is correct",
                ) from error

    def close(self) -> None:
        """Close the connection; may be called twice."""
        with self.lock:
            if self._db is not None:
                with suppress(psycopg.Error):
                    self._db.close()
            self._db = None

    def _open(self) -> Connection:
        if self._db is None or self._db.closed:
            self._db = open_connection(self._address)
        return self._db


def open_connection(address: str, name: str = "isthmus") -> Connection:
    """Open a connection with application name `name` whose commits are synchronous.

    A silent server is given up after about 10 s. Raises `InputError` for a malformed address (without
    repeating it) and psycopg's errors.
    """
    try:
        psycopg.conninfo.conninfo_to_dict(address)
    except psycopg.Error:
        raise InputError(
            "the address of the PostgreSQL database cannot be read",
            hint="for example postgresql://isthmus:PASSWORD@db.example/isthmus",
        ) from None
    db = psycopg.connect(
        address,
        autocommit=True,
        connect_timeout=5,
        application_name=name,
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
    )
    db.execute(
        "SELECT set_config('idle_in_transaction_session_timeout', %s, false)",
        (f"{TRANSACTION_IDLE_LIMIT_S}s",),
    )
    db.execute(
        "SELECT set_config('synchronous_commit', 'on', false) "
        "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
    )
    return db


class PostgresStore:
    """A `Store` in the database at `address`, a psycopg connection string; creates its tables.

    Raises `InputError` for a malformed address, `UnavailableError` if the database cannot be reached or
    written, and `ProtocolError` if a newer version of isthmus has migrated it.
    """

    shared = True

    def __init__(self, address: str) -> None:
        self._log_session, self._output_session, self._read_session = (
            PostgresSession(address),
            PostgresSession(address),
            PostgresSession(address),
        )
        self._group_commit = GroupCommit[Connection](self._commit, data_errors=(InputError,))
        self._thread_state = threading.local()
        try:
            with self._log_session.connection() as db, db.transaction():
                migrate(db)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def exclusive_access(self) -> Iterator[None]:
        """Lock the log; see `Store`."""
        with self._log_session.connection() as db, db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (EVENT_LOG_LOCK,))
            self._thread_state.turn = True
            try:
                yield
            finally:
                self._thread_state.turn = False

    def append(self, events: Sequence[Event], expected_last: int | None = None) -> int:
        """Append events; see `Store`."""
        if not getattr(self._thread_state, "turn", False):
            with self.exclusive_access():
                return self.append(events, expected_last)
        bodies = [encode_event(event) for event in events]
        with self._log_session.connection() as db:
            found = db.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()
            last = int(found[0]) if found else 0
            if expected_last is not None and last != expected_last:
                raise LogMovedError(expected_last, last)
            if bodies:
                numbers = list(range(last + 1, last + len(bodies) + 1))
                # Binary arrays: the text form escapes each quote, which is about 100 times slower.
                db.execute("INSERT INTO events SELECT * FROM unnest(%b::bigint[], %b::text[])", (numbers, bodies))
        return last + len(bodies)

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield events; see `Store`."""
        while True:
            sql = "SELECT number, body FROM events WHERE number > %s ORDER BY number LIMIT %s"
            rows = self._read(sql, after, PAGE_SIZE)
            for number, body in rows:
                yield number, decode_event(body)
            if len(rows) < PAGE_SIZE:
                return
            after = rows[-1][0]

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Store metrics; see `Store`."""
        rows = [(one.job, one.attempt, one.rank, one.step, one.model_dump_json()) for one in metrics]
        sql = "INSERT INTO metrics (job, attempt, rank, step, body) VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING"

        def write(db: Connection) -> None:
            with db.cursor() as cursor:
                cursor.executemany(sql, rows)

        self._group_commit.write(write)

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000) -> MetricsPage:
        """Return metrics; see `Store`."""
        sql = "SELECT number, body FROM metrics WHERE job = %s AND number > %s ORDER BY number LIMIT %s"
        rows = self._read(sql, job_id, after, limit)
        found = tuple(StepMetrics.model_validate_json(body) for _, body in rows)
        return MetricsPage(metrics=found, next=rows[-1][0] if rows else after)

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Store log text; see `Store`."""

        def write(db: Connection) -> None:
            for chunk in chunks:
                of_rank = (chunk.job, chunk.attempt, chunk.rank)
                sql = "SELECT coalesce(max(stop), 0) FROM logs WHERE job = %s AND attempt = %s AND rank = %s"
                found = db.execute(sql, of_rank).fetchone()
                fresh = trim_stored_bytes(chunk, int(found[0]) if found else 0)
                if fresh is not None:
                    row = (*of_rank, fresh.offset, chunk_end_bytes(fresh), fresh.text.encode())
                    db.execute(
                        "INSERT INTO logs (job, attempt, rank, start, stop, body) VALUES (%s, %s, %s, %s, %s, %s)",
                        row,
                    )

        self._group_commit.write(write)

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return log text; see `Store`."""
        sql = (
            "SELECT number, job, attempt, rank, start, body FROM logs WHERE job = %s AND number > %s "
            "AND (%s::bigint IS NULL OR rank = %s) ORDER BY number LIMIT %s"
        )
        rows = self._read(sql, job_id, after, rank, rank, limit)
        chunks = tuple(
            LogChunk(job=job, attempt=attempt, rank=of, offset=start, text=bytes(body).decode())
            for _, job, attempt, of, start, body in rows
        )
        return LogPage(chunks=chunks, next=rows[-1][0] if rows else after)

    def delete_job_output(self, job_id: str) -> None:
        """Delete a job's metrics and logs; see `Store`."""

        def write(db: Connection) -> None:
            db.execute("DELETE FROM metrics WHERE job = %s", (job_id,))
            db.execute("DELETE FROM logs WHERE job = %s", (job_id,))

        self._group_commit.write(write)

    def put_token(self, token: StoredToken) -> None:
        """Store a token; see `Store`."""
        sql = (
            "INSERT INTO tokens (digest, role, name, created_s) VALUES (%s, %s, %s, %s) "
            "ON CONFLICT (digest) DO UPDATE "
            "SET role = excluded.role, name = excluded.name, created_s = excluded.created_s"
        )
        row = (token.digest, token.role, token.name, token.created_s)
        self._group_commit.write(lambda db: db.execute(sql, row) and None)

    def find_token(self, digest: str) -> StoredToken | None:
        """Return a token; see `Store`."""
        rows = self._read("SELECT digest, role, name, created_s FROM tokens WHERE digest = %s", digest)
        return _token(rows[0]) if rows else None

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token; see `Store`."""
        rows = self._read("SELECT digest, role, name, created_s FROM tokens ORDER BY created_s")
        return tuple(_token(row) for row in rows)

    def close(self) -> None:
        """Close the connections; see `Store`."""
        for session in (self._log_session, self._output_session, self._read_session):
            session.close()

    def _read(self, sql: str, *values: Any) -> list[Any]:
        with self._read_session.connection() as db:
            return db.execute(sql, values).fetchall()

    def _commit(self, writes: Sequence[Any]) -> list[Any]:
        """Run writes in one transaction; if one fails, roll back all."""
        with self._output_session.connection() as db, db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (OUTPUT_LOCK,))
            return [write(db) for write in writes]


def _token(row: tuple[str, str, str, float]) -> StoredToken:
    digest, role, name, created_s = row
    return StoredToken(digest=digest, role=role, name=name, created_s=created_s)
