"""`SqlQueries`: the reads and writes that SQLite and PostgreSQL express in the same SQL."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from isthmus.control.state.events import Event, decode_event
from isthmus.control.store.store_interface import SECRET_BYTES, StoredToken, chunk_end_bytes, trim_stored_bytes
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.api_views import LogPage, MetricsPage

PAGE_SIZE = 1000
"""Events per query of a log that is read from its start."""

Session = TypeVar("Session")


class SqlQueries(ABC, Generic[Session]):
    """The part of a `Store` that is equal in every SQL database; a subclass runs the statements.

    `Session` is an open connection. Statements mark each value with `?`.
    """

    @abstractmethod
    def _read(self, sql: str, *values: Any) -> list[Any]:
        """Return the rows of a query."""

    @abstractmethod
    def _write(self, write: Callable[[Session], Any]) -> Any:
        """Return the result of `write`, which runs in a transaction; it is on disk by then."""

    @abstractmethod
    def _execute(self, session: Session, sql: str, *values: Any) -> Any:
        """Run a statement inside `_write`; return its cursor."""

    @abstractmethod
    def _execute_many(self, session: Session, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run a statement inside `_write` once for each row of values."""

    @abstractmethod
    def _encode_log(self, text: str) -> str | bytes:
        """Return log text as the column `logs.body` holds it."""

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield events; see `Store`."""
        while True:
            sql = "SELECT number, body FROM events WHERE number > ? ORDER BY number LIMIT ?"
            rows = self._read(sql, after, PAGE_SIZE)
            for number, body in rows:
                yield number, decode_event(body)
            if len(rows) < PAGE_SIZE:
                return
            after = rows[-1][0]

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Store metrics; see `Store`."""
        rows = [(one.job, one.attempt, one.rank, one.step, one.model_dump_json()) for one in metrics]
        sql = "INSERT INTO metrics (job, attempt, rank, step, body) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
        self._write(lambda session: self._execute_many(session, sql, rows))

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000, *, newest: bool = False) -> MetricsPage:
        """Return metrics; see `Store`."""
        sql = "SELECT number, body FROM metrics WHERE job = ? AND number > ? ORDER BY number LIMIT ?"
        if newest:
            sql = "SELECT number, body FROM metrics WHERE job = ? AND number > ? ORDER BY number DESC LIMIT ?"
        rows = sorted(self._read(sql, job_id, after, limit))
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
            "SELECT number, job, attempt, rank, start, body FROM logs WHERE job = ? AND number > ? "
            "AND (CAST(? AS bigint) IS NULL OR rank = ?) ORDER BY number LIMIT ?"
        )
        rows = self._read(sql, job_id, after, rank, rank, limit)
        chunks = tuple(
            LogChunk(job=job, attempt=attempt, rank=of, offset=start, text=_decode_log(body))
            for _, job, attempt, of, start, body in rows
        )
        return LogPage(chunks=chunks, next=rows[-1][0] if rows else after)

    def delete_job_output(self, job_id: str) -> None:
        """Delete a job's metrics and logs; see `Store`."""

        def write(session: Session) -> None:
            self._execute(session, "DELETE FROM metrics WHERE job = ?", job_id)
            self._execute(session, "DELETE FROM logs WHERE job = ?", job_id)

        self._write(write)

    def put_token(self, token: StoredToken) -> None:
        """Store a token; see `Store`."""
        sql = (
            "INSERT INTO tokens (digest, role, name, created_s) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (digest) DO UPDATE "
            "SET role = excluded.role, name = excluded.name, created_s = excluded.created_s"
        )
        row = (token.digest, token.role, token.name, token.created_s)
        self._write(lambda session: self._execute(session, sql, *row))

    def find_token(self, digest: str) -> StoredToken | None:
        """Return a token; see `Store`."""
        rows = self._read("SELECT digest, role, name, created_s FROM tokens WHERE digest = ?", digest)
        return _token(rows[0]) if rows else None

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token; see `Store`."""
        rows = self._read("SELECT digest, role, name, created_s FROM tokens ORDER BY created_s")
        return tuple(_token(row) for row in rows)

    def secret(self, name: str) -> bytes:
        """Return a secret; see `Store`."""
        find, made = "SELECT value FROM secrets WHERE name = ?", secrets.token_hex(SECRET_BYTES)
        rows = self._read(find, name)
        if not rows:
            sql = "INSERT INTO secrets (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING"
            self._write(lambda session: self._execute(session, sql, name, made))
            rows = self._read(find, name)
        return bytes.fromhex(rows[0][0])


def _decode_log(body: str | bytes) -> str:
    return body if isinstance(body, str) else bytes(body).decode()


def _token(row: tuple[str, str, str, float]) -> StoredToken:
    digest, role, name, created_s = row
    return StoredToken(digest=digest, role=role, name=name, created_s=created_s)
