"""`StoredLog`: the tables of a store, read without opening it as a server; `check_log` verifies its event log."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isthmus.control.state.events import decode_event
from isthmus.control.store.log_base import LogBase
from isthmus.control.store.log_chain import LogDamagedError, LogEnd, chain_start, follow_link
from isthmus.control.store.snapshot_codec import restore_base
from isthmus.control.store.tables.audit_queries import AUDIT_FIELDS, read_lines
from isthmus.core.errors import FileError, IsthmusError, NotFoundError, ProtocolError, UnavailableError
from isthmus.core.views.access_views import AuditRecord
from isthmus.core.views.audit_chain import AuditEnd, AuditReport, check_audit

PAGE_SIZE = 1000
MAX_PROBLEMS = 20
"""Problems that a report lists; the rest is counted."""
_NOTHING = LogEnd(0, b"")
_AUDIT_TYPES = (int, float, str, str, str, str, str, str, str, str)


class StoredLog(Protocol):
    """The tables of a store as of one moment."""

    # What the store is, for messages: a file or a database.
    name: str

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Return the rows of a query, whose values are marked with `?`."""

    def columns(self, table: str) -> frozenset[str]:
        """Return the names of a table's columns; none without such a table."""


class SqliteLog:
    """The tables of an SQLite file, which a server may be using."""

    def __init__(self, path: Path, db: sqlite3.Connection) -> None:
        self.name, self.db = str(path), db

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Return the rows of a query; see `StoredLog`."""
        try:
            return self.db.execute(sql, values).fetchall()
        except (sqlite3.Error, OverflowError) as error:
            raise FileError(
                f"it cannot be read as a store of isthmus: {error}",
                file=self.name,
                hint="name the file `isthmus.db` of a server, or one that `isthmus server backup` wrote",
            ) from error

    def columns(self, table: str) -> frozenset[str]:
        """Return the names of a table's columns; see `StoredLog`."""
        return frozenset(name for (name,) in self.rows("SELECT name FROM pragma_table_info(?)", table))


@contextmanager
def open_sqlite_log(path: Path) -> Iterator[SqliteLog]:
    """Open an SQLite file for reading; raise `NotFoundError` if there is none."""
    if not path.is_file():
        raise NotFoundError(f"there is no database {path}", hint="name the state folder of a server: --state")
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as db:
        log = SqliteLog(path, db)
        log.rows("BEGIN")
        yield log


@contextmanager
def open_postgres_log(address: str) -> Iterator[StoredLog]:
    """Open a PostgreSQL database for reading, in one transaction that sees one moment."""
    import psycopg

    from isthmus.control.store.postgres_store import open_connection

    class PostgresLog:
        name = "the PostgreSQL database"

        def rows(self, sql: str, *values: Any) -> list[Any]:
            return db.execute(sql.replace("?", "%s").encode(), values).fetchall()

        def columns(self, table: str) -> frozenset[str]:
            names = (
                "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped"
            )
            return frozenset(name for (name,) in self.rows(names, table))

    try:
        with contextlib.closing(open_connection(address)) as db, db.transaction():
            db.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield PostgresLog()
    except psycopg.Error as error:
        raise UnavailableError(
            f"the PostgreSQL database cannot be read: {str(error).strip()}",
            hint="check that it runs, that the file with its address is correct, and that a server has used it",
        ) from error


@dataclass(frozen=True, kw_only=True)
class LogReport:
    """What `check_log` found: the log's identity and end, and every problem."""

    name: str
    store: str | None
    num_events: int
    # Number and hash of the last event whose chain is complete.
    end: LogEnd
    problems: tuple[str, ...]
    # Number of the last event that a base replaces; 0 in a log that was never compacted.
    base: int = 0
    # The audit log, with problems that are also in `problems`; None in a store of an earlier version, without hashes.
    audit: AuditReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that commands print."""
        last = {"last_event": self.end.number, "last_hash": self.end.digest.hex()}
        found = {"name": self.name, "store": self.store, "base": self.base, "events": self.num_events}
        audit = {"audit": self.audit.as_dict()} if self.audit is not None else {}
        return {**found, **last, "problems": self.problems, **audit}


def store_identity(log: StoredLog) -> str | None:
    """Return the identity of a store, None for one of an earlier version, whose events have no hashes."""
    if not log.columns("events"):
        raise NotFoundError(
            f"{log.name} holds no store of isthmus", hint="name the state folder or the database of a server"
        )
    found = log.rows("SELECT store FROM identity") if log.columns("identity") else []
    return str(found[0][0]) if found else None


def check_log(
    log: StoredLog, known_store: str | None = None, known: LogEnd = _NOTHING, known_audit: LogEnd = _NOTHING
) -> LogReport:
    """Verify numbers, hashes and form of every event, and that the log contains the acknowledged event `known`.

    The same for the audit log and its line `known_audit`.

    The log of a compacted store begins behind its base, which one of its events must record.

    `known_store` is the identity that the state folder names, None if it names none.
    """
    store = store_identity(log)
    if store is None:
        problem = "the log has no hashes yet: start a server of this version on it once"
        return LogReport(name=log.name, store=None, num_events=0, end=_NOTHING, problems=(problem,))
    problems = _Problems()
    if known_store is not None and known_store != store:
        problems.add(f"the state folder belongs to store {known_store}, the database to store {store}")
    base = _read_base(log, problems)
    end, num_events, digest_of_known = chain_start(store) if base is None else base.end, 0, b""
    sound, broken, is_recorded, first = end, False, base is None, end.number
    for number, body, stored in stored_events(log, first):
        num_events += 1
        digest = bytes(stored or b"")
        try:
            end = follow_link(end, number, body, digest)
            event = decode_event(body)
            is_recorded = is_recorded or (base is not None and base.is_recorded_by(event))
        except (IsthmusError, ValueError) as error:
            problems.add(_problem(number, error))
            end, broken = LogEnd(number, digest), True
        sound = sound if broken else end
        digest_of_known = digest if number == known.number else digest_of_known
    if not is_recorded:
        problems.add(f"no event records the base that replaces those up to {first}: it is forged, or the end is lost")
    if known.number and digest_of_known != known.digest:
        problems.add(f"event {known.number}, which this server has acknowledged, is missing or another one")
    audit = _check_audit(log, store, AuditEnd(*known_audit))
    for one in audit.problems if audit is not None else ():
        problems.add(f"audit log: {one}")
    return LogReport(
        name=log.name,
        store=store,
        num_events=num_events,
        end=sound,
        problems=problems.listed(),
        base=first,
        audit=audit,
    )


def _check_audit(log: StoredLog, store_id: str, known: AuditEnd) -> AuditReport | None:
    """Verify the audit log; None for one of an earlier version. Raises `FileError` for a row of other types."""
    if not log.columns("audit").issuperset(AUDIT_FIELDS):
        return None

    def checked(line: AuditRecord) -> AuditRecord:
        values = [getattr(line, field) for field in AUDIT_FIELDS]
        if any(not isinstance(value, kind) for value, kind in zip(values, _AUDIT_TYPES, strict=True)):
            raise FileError("a row of the audit log is no line", file=log.name, hint="restore a backup")
        return line

    return check_audit(store_id, map(checked, read_lines(log.rows)), known)


def _read_base(log: StoredLog, problems: _Problems) -> LogBase | None:
    """Return the active base of a store and report what is wrong with it."""
    if not log.columns("bases"):
        return None
    sql = "SELECT number, hash, made_s, body FROM bases WHERE active = 1 ORDER BY number DESC LIMIT 1"
    rows = log.rows(sql)
    if not rows:
        return None
    number, digest, made_s, body = rows[0]
    blobs = all(isinstance(one, bytes | memoryview) for one in (digest, body))
    if type(number) is not int or number < 1 or not blobs or not isinstance(made_s, int | float):
        raise FileError("the base of the log is none", file=log.name, hint="restore a backup")
    base = LogBase(end=LogEnd(number, bytes(digest)), made_s=float(made_s), body=bytes(body))
    try:
        restore_base(base)
    except LogDamagedError as error:
        problems.add(_problem(number, error))
    return base


def stored_events(log: StoredLog, after: int = -1) -> Iterator[tuple[int, str, Any]]:
    """Yield number, encoded form and hash of every event above `after`, in order.

    Raises `FileError` for a row of other types.
    """
    page = "SELECT number, body, hash FROM events WHERE number > ? ORDER BY number LIMIT ?"
    while rows := log.rows(page, after, PAGE_SIZE):
        for number, body, digest in rows:
            if type(number) is not int or not isinstance(body, str) or not isinstance(digest, bytes | None):
                raise FileError(f"a row behind event {after} is no event", file=log.name, hint="restore a backup")
            yield number, body, digest
            after = number


class _Problems:
    """The first problems, and how many there were."""

    def __init__(self) -> None:
        self._first, self._count = list[str](), 0

    def add(self, problem: str) -> None:
        self._count += 1
        if self._count <= MAX_PROBLEMS:
            self._first.append(problem)

    def listed(self) -> tuple[str, ...]:
        more = self._count - len(self._first)
        return (*self._first, *([f"and {more} more"] if more else []))


def _problem(number: int, error: Exception) -> str:
    if isinstance(error, LogDamagedError):
        return f"event {error.number}: {error.problem}"
    text = error.message if isinstance(error, ProtocolError) else str(error)
    return f"event {number}: {text[:300]}"
