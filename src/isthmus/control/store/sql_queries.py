"""`SqlQueries`: the reads and writes that SQLite and PostgreSQL express in the same SQL, and the end of the log.

A store remembers the last event that it has appended or read completely. A log that no longer contains that event has
lost something that was acknowledged: every later read and append fails with `LogDamagedError`.
"""

from __future__ import annotations

import math
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from isthmus.control.state.events import Event, decode_event
from isthmus.control.store.base_table import BaseTable, SqlBaseTable
from isthmus.control.store.log_base import LogBase, LogCompactedError
from isthmus.control.store.log_chain import LogDamagedError, LogEnd, chain_start, follow_link, require_end
from isthmus.control.store.store_interface import (
    SECRET_BYTES,
    StoredToken,
    chunk_end_bytes,
    take_page,
    trim_stored_bytes,
)
from isthmus.control.store.tables.audit_queries import AuditQueries
from isthmus.control.store.tables.notice_queries import NoticeQueries
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.views.access_views import AuditRecord
from isthmus.core.views.api_views import LogPage, MetricsPage
from isthmus.core.views.audit_chain import AuditEnd

_ROWS_AT_ONCE = 64
"""Rows of output that are read before their sizes are known."""
_LAST_NUMBER = 2**63 - 1
PAGE_SIZE = 1000
"""Events per query of a log that is read from its start."""

TOKEN_FIELDS = (
    "digest",
    "role",
    "name",
    "created_s",
    "expires_s",
    "revoked_s",
    "created_by",
    "site",
    "replaces",
    "session_of",
    "high",
)
"""Columns of the tokens, which `StoredToken` names alike."""

Session = TypeVar("Session")


def _rows(read: Callable[[int, int], list[Any]], first: int) -> Iterator[Any]:
    """Yield the rows of a query, some at a time; `read(number, count)` returns the next ones behind row `number`."""
    last = first
    while rows := read(last, _ROWS_AT_ONCE):
        yield from rows
        last = rows[-1][0]


class SqlQueries(AuditQueries[Session], NoticeQueries[Session]):
    """The part of a `Store` that is equal in every SQL database; a subclass runs the statements.

    `Session` is an open connection. Statements mark each value with `?`. A subclass sets `store_id` and calls
    `_initialize` before the first read.
    """

    def _initialize(self) -> None:
        self._initialize_audit()
        self._known, self._known_lock = LogEnd(0, b""), threading.Lock()
        self._on_durable: Callable[[LogEnd], None] = lambda _: None
        # Number of the active base that was read last; infinite before the first read.
        self._base_number: float = math.inf
        self.bases: BaseTable = SqlBaseTable(self._read, self.change_rows)

    def follow_end(self, known: LogEnd, on_durable: Callable[[LogEnd], None]) -> LogEnd:
        """Require that the log contains the acknowledged event `known`; return its end.

        `on_durable` is then called with the end of the log, now and whenever this store finds or makes it longer.
        Raises `LogDamagedError` if the event is missing or another one.
        """
        rows = self._read("SELECT number, hash FROM events ORDER BY number DESC LIMIT 1")
        end = LogEnd(rows[0][0], _hash(rows[0][1])) if rows else self._first_end()
        base = self.bases.active_end()
        if base is not None and 0 < known.number <= base.number:
            raise LogDamagedError(
                known.number,
                f"it was acknowledged, and now a base replaces the events up to {base.number}: a server that was away "
                "for so long begins with an empty state folder",
            )
        require_end(known, end, self.digest_at(known.number))
        self._on_durable = on_durable
        self._remember_end(end)
        on_durable(end)
        return end

    def digest_at(self, number: int) -> bytes | None:
        """Return the hash of an event that the log has, None otherwise."""
        rows = self._read("SELECT hash FROM events WHERE number = ?", number)
        return _hash(rows[0][0]) if rows else None

    def _require_known(self, end: LogEnd) -> None:
        """Raise `LogDamagedError` if a log with this end lacks the last event that this store knows."""
        known = self._known
        require_end(known, end, end.digest if end.number == known.number else known.digest)

    def _remember_end(self, end: LogEnd) -> None:
        """Remember the durable end of the log, unless a later one is known already."""
        with self._known_lock:
            if end.number > self._known.number:
                self._known = end
                self._on_durable(end)

    @abstractmethod
    def _encode_log(self, text: str) -> str | bytes:
        """Return log text as the column `logs.body` holds it."""

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield events, each once it follows the one before by number and hash; see `Store`.

        Raises `LogDamagedError` at the first event that does not, at the end if an acknowledged one is missing, and if
        no event records the base that the log begins with.
        """
        known = self._known
        base = self._base_from(after) if after <= self._base_number or after != known.number else None
        sql = "SELECT number, body, hash FROM events WHERE number >= ? ORDER BY number LIMIT ?"
        if base is not None:
            end = base.end
        elif after:
            first = self._read(sql, after, 1)
            if not first or first[0][0] != after:
                self._require_uncompacted(after)
            end = _end_at(after, first, known)
        else:
            end = chain_start(self.store_id)
        while True:
            rows = self._read(sql, end.number, PAGE_SIZE)
            for number, body, digest in rows:
                if number > end.number:
                    if number != end.number + 1:
                        self._require_uncompacted(end.number)
                    end = follow_link(end, number, body, _hash(digest))
                    event = decode_event(body)
                    base = None if base is not None and base.is_recorded_by(event) else base
                    yield number, event
            if len(rows) < PAGE_SIZE:
                if base is not None:
                    raise LogDamagedError(base.end.number, "no event records the base that replaces those up to it")
                require_end(known, end, end.digest if end.number == known.number else known.digest)
                self._remember_end(end)
                return

    def _first_end(self) -> LogEnd:
        """Return the end of a log without events."""
        return self.bases.active_end() or chain_start(self.store_id)

    def _base_from(self, after: int) -> LogBase | None:
        """Return the active base if a read behind event `after` begins with it; raise `LogCompactedError`."""
        end = self.bases.active_end()
        self._base_number = 0 if end is None else end.number
        if end is None or after > end.number:
            return None
        if 0 < after < end.number:
            raise LogCompactedError(after, end.number)
        return self.bases.active()

    def _require_uncompacted(self, after: int) -> None:
        """Raise `LogCompactedError` if compaction has dropped events after number `after`."""
        base = self.bases.active_end()
        if base is not None and after < base.number:
            raise LogCompactedError(after, base.number)

    def change_rows(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> list[int]:
        """Run statements in one transaction; return how many rows each has changed."""
        done = list(statements)
        changed: list[int] = self._write(
            lambda session: [self._execute(session, sql, *values).rowcount for sql, values in done]
        )
        return changed

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Store metrics; see `Store`."""
        rows = [(one.job, one.attempt, one.rank, one.step, one.model_dump_json()) for one in metrics]
        sql = "INSERT INTO metrics (job, attempt, rank, step, body) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
        self._write(lambda session: self._execute_many(session, sql, rows))

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000, *, newest: bool = False) -> MetricsPage:
        """Return metrics; see `Store`."""
        sql = "SELECT number, body FROM metrics WHERE job = ? AND number > ? ORDER BY number LIMIT ?"
        read = partial(self._read, sql, job_id)
        if newest:
            sql = (
                "SELECT number, body FROM metrics WHERE job = ? AND number > ? AND number < ? "
                "ORDER BY number DESC LIMIT ?"
            )
            read = partial(self._read, sql, job_id, after)
        rows = sorted(take_page(_rows(read, _LAST_NUMBER if newest else after), limit))
        found = tuple(StepMetrics.model_validate_json(body) for _, body in rows)
        return MetricsPage(metrics=found, next=rows[-1][0] if rows else after)

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Store log text; see `Store`."""

        def write(session: Session) -> None:
            for chunk in chunks:
                of_rank = (chunk.job, chunk.attempt, chunk.rank)
                sql = "SELECT coalesce(max(stop), 0) FROM logs WHERE job = ? AND attempt = ? AND rank = ?"
                (stored_bytes,) = self._execute(session, sql, *of_rank).fetchone()
                fresh = trim_stored_bytes(chunk, int(stored_bytes))
                if fresh is not None:
                    row = (*of_rank, fresh.offset, chunk_end_bytes(fresh), self._encode_log(fresh.text))
                    sql = "INSERT INTO logs (job, attempt, rank, start, stop, body) VALUES (?, ?, ?, ?, ?, ?)"
                    self._execute(session, sql, *row)

        self._write(write)

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return log text; see `Store`."""
        sql = (
            "SELECT number, job, attempt, rank, start, body FROM logs WHERE job = ? "
            "AND (CAST(? AS bigint) IS NULL OR rank = ?) AND number > ? ORDER BY number LIMIT ?"
        )
        rows = take_page(_rows(partial(self._read, sql, job_id, rank, rank), after), limit)
        chunks = tuple(
            LogChunk(job=job, attempt=attempt, rank=of, offset=start, text=_decode_log(body))
            for _, job, attempt, of, start, body in rows
        )
        return LogPage(chunks=chunks, next=rows[-1][0] if rows else after)

    def output_size(self, job_id: str) -> tuple[int, int]:
        """Return the size of a job's output; see `Store`."""
        ((num_lines,),) = self._read("SELECT count(*) FROM metrics WHERE job = ?", job_id)
        ((log_bytes,),) = self._read("SELECT coalesce(sum(stop - start), 0) FROM logs WHERE job = ?", job_id)
        return int(num_lines), int(log_bytes)

    def delete_job_output(self, job_id: str) -> None:
        """Delete a job's metrics and logs; see `Store`."""

        def write(session: Session) -> None:
            self._execute(session, "DELETE FROM metrics WHERE job = ?", job_id)
            self._execute(session, "DELETE FROM logs WHERE job = ?", job_id)

        self._write(write)

    def put_token(self, token: StoredToken, audit: Sequence[AuditRecord] = ()) -> None:
        """Store a token; see `Store`."""
        sql = (
            "INSERT INTO tokens (digest, role, name, created_s, expires_s, revoked_s, created_by, site, replaces, "
            "session_of, high) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO UPDATE "
            "SET role = excluded.role, name = excluded.name, created_s = excluded.created_s, "
            "expires_s = excluded.expires_s, revoked_s = excluded.revoked_s, created_by = excluded.created_by, "
            "site = excluded.site, replaces = excluded.replaces, session_of = excluded.session_of, high = excluded.high"
        )
        row = [getattr(token, name) for name in TOKEN_FIELDS[:-1]]

        def write(session: Session) -> AuditEnd | None:
            self._execute(session, sql, *row, int(token.high))
            return self._append_lines(session, audit)

        self._remember_audit(self._write(write))

    def find_token(self, digest: str) -> StoredToken | None:
        """Return a token; see `Store`."""
        sql = (
            "SELECT digest, role, name, created_s, expires_s, revoked_s, created_by, site, replaces, session_of, high "
            "FROM tokens WHERE digest = ?"
        )
        rows = self._read(sql, digest)
        return _token(rows[0]) if rows else None

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token; see `Store`."""
        sql = (
            "SELECT digest, role, name, created_s, expires_s, revoked_s, created_by, site, replaces, session_of, high "
            "FROM tokens ORDER BY created_s"
        )
        return tuple(_token(row) for row in self._read(sql))

    def prune_sessions(self, ended_s: float) -> None:
        """Delete ended sessions; see `Store`."""
        sql = "DELETE FROM tokens WHERE session_of <> '' AND expires_s < ?"
        self._write(lambda session: self._execute(session, sql, ended_s))

    def token_version(self) -> tuple[float, ...]:
        """Return numbers that differ after a change; see `Store`."""
        sql = (
            "SELECT count(*), count(revoked_s), coalesce(sum(created_s), 0), coalesce(sum(expires_s), 0), "
            "coalesce(sum(high), 0) FROM tokens"
        )
        return tuple(float(value) for value in self._read(sql)[0])

    def secret(self, name: str) -> bytes:
        """Return a secret; see `Store`."""
        find, made = "SELECT value FROM secrets WHERE name = ?", secrets.token_hex(SECRET_BYTES)
        rows = self._read(find, name)
        if not rows:
            sql = "INSERT INTO secrets (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING"
            self._write(lambda session: self._execute(session, sql, name, made))
            rows = self._read(find, name)
        return bytes.fromhex(rows[0][0])


def _hash(stored: bytes | memoryview | None) -> bytes:
    return b"" if stored is None else bytes(stored)


def _end_at(after: int, rows: Sequence[Sequence[Any]], known: LogEnd) -> LogEnd:
    """Return the end of the log at event `after`, which `rows` begin with, as a reader has seen it before."""
    if not rows or rows[0][0] != after:
        raise LogDamagedError(after, "it was read before, and is missing now")
    end = LogEnd(after, _hash(rows[0][2]))
    if known.number == after and known != end:
        raise LogDamagedError(after, "it is another one than was read before")
    return end


def _decode_log(body: str | bytes) -> str:
    return body if isinstance(body, str) else bytes(body).decode()


def _token(row: Sequence[Any]) -> StoredToken:
    return StoredToken.model_validate(dict(zip(TOKEN_FIELDS, row, strict=True)))
