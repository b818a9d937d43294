"""`PostgresStore`: a store that several servers share, a PostgreSQL database accessed through psycopg 3.

The log has one writer at a time: a `exclusive_access` holds an advisory lock for one transaction, so the lock of a
server that dies is released at once, and that of one that hangs after `TRANSACTION_IDLE_LIMIT_S`. Every append also
checks the expected event number, so a server that has lost its lock cannot append. Lost connections are reopened. The
address may contain a password; it never appears in messages, logs or the process list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from isthmus.control.state.events import Event, NoticeDue, encode_event
from isthmus.control.store.group_commit import GroupCommit
from isthmus.control.store.log_chain import LogEnd, link_rows, new_store_id
from isthmus.control.store.postgres_schema import migrate
from isthmus.control.store.sql_queries import SqlQueries
from isthmus.control.store.store_interface import LogMovedError
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.views.access_views import AuditRecord

EVENT_LOG_LOCK = 0x15_7468_6D75_7301
"""Advisory lock for appending events."""
OUTPUT_LOCK = 0x15_7468_6D75_7302
"""Advisory lock for writing metrics and logs: rows become visible in the order of their numbers."""
AUDIT_LOCK = 0x15_7468_6D75_7305
"""Advisory lock for the end of the audit log, the last one that a transaction takes."""
TRANSACTION_IDLE_LIMIT_S = 10
"""Seconds after which the database ends an idle transaction, and with it a server's turn."""
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


class PostgresStore(SqlQueries[Connection]):
    """A `Store` in the database at `address`, a psycopg connection string; creates its tables.

    An empty database gets the identity `new_id`, random by default. Raises `InputError` for a malformed address,
    `UnavailableError` if the database cannot be reached or written, `ProtocolError` if a newer version of isthmus has
    migrated it, and `OtherStoreError` if its identity is not `expected_id`.
    """

    shared = True

    def __init__(self, address: str, *, expected_id: str | None = None, new_id: str | None = None) -> None:
        self._initialize()
        self._log_session, self._output_session, self._read_session = (
            PostgresSession(address),
            PostgresSession(address),
            PostgresSession(address),
        )
        self._group_commit = GroupCommit[Connection](self._commit, data_errors=(InputError,))
        self._thread_state = threading.local()
        try:
            with self._log_session.connection() as db, db.transaction():
                self.store_id = migrate(db, expected_id, new_id or new_store_id())
        except BaseException:
            self.close()
            raise

    @contextmanager
    def exclusive_access(self) -> Iterator[None]:
        """Lock the log; see `Store`."""
        with self._log_session.connection() as db, db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (EVENT_LOG_LOCK,))
            self._thread_state.turn, self._thread_state.end, self._thread_state.audit_end = True, None, None
            try:
                yield
            finally:
                self._thread_state.turn = False
        if self._thread_state.end is not None:  # committed by now
            self._remember_end(self._thread_state.end)
        self._remember_audit(self._thread_state.audit_end)

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        """Append events; see `Store`."""
        if not getattr(self._thread_state, "turn", False):
            with self.exclusive_access():
                return self.append(events, expected_last, audit, notices)
        bodies = [encode_event(event) for event in events]
        with self._log_session.connection() as db:
            found = db.execute("SELECT number, hash FROM events ORDER BY number DESC LIMIT 1").fetchone()
            end = LogEnd(found[0], bytes(found[1])) if found else self._first_end()
            self._require_known(end)
            if expected_last is not None and end.number != expected_last:
                raise LogMovedError(expected_last, end.number)
            rows = link_rows(end, bodies)
            if rows:
                # Binary arrays: the text form escapes each quote, which is about 100 times slower.
                insert = "INSERT INTO events SELECT * FROM unnest(%b::bigint[], %b::text[], %b::bytea[])"
                db.execute(insert, tuple(map(list, zip(*rows, strict=True))))
                self._thread_state.end = LogEnd(rows[-1][0], rows[-1][2])
            self._thread_state.audit_end = self._append_lines(db, audit)
            self._append_notices(db, notices)
        return end.number + len(rows)

    def close(self) -> None:
        """Close the connections; see `Store`."""
        for session in (self._log_session, self._output_session, self._read_session):
            session.close()

    def _read(self, sql: str, *values: Any) -> list[Any]:
        with self._read_session.connection() as db:
            found: list[Any] = self._execute(db, sql, *values).fetchall()
            return found

    def _write(self, write: Callable[[Connection], Any]) -> Any:
        return self._group_commit.write(write)

    def _execute(self, session: Connection, sql: str, *values: Any) -> Any:
        return session.execute(_statement(sql), values)

    def _execute_many(self, session: Connection, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with session.cursor() as cursor:
            cursor.executemany(_statement(sql), rows)

    def _lock_audit(self, session: Connection) -> None:
        session.execute("SELECT pg_advisory_xact_lock(%s)", (AUDIT_LOCK,))

    def _encode_log(self, text: str) -> bytes:
        return text.encode()

    def _commit(self, writes: Sequence[Any]) -> list[Any]:
        """Run writes in one transaction; if one fails, roll back all."""
        with self._output_session.connection() as db, db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (OUTPUT_LOCK,))
            return [write(db) for write in writes]


def _statement(sql: str) -> str:
    """Return a statement of `SqlQueries` with psycopg's mark for values."""
    return sql.replace("?", "%s")
