"""The store: what the control plane must not forget, behind one seam, `Store`; and the one for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from isthmus.control.state.events import Event, decode, encode
from isthmus.core.base import Frozen, Name
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.messages.api_views import LogPage, MetricsPage


class StoredToken(Frozen):
    """A token as it is kept: who it speaks for, and its hash, never itself."""

    role: str
    name: Name
    digest: str
    created_s: float


class LogMovedError(ConflictError):
    """The log has grown behind the back of whoever wanted to append to it."""

    def __init__(self, expected: int, found: int | None = None) -> None:
        now = "another number" if found is None else f"number {found}"
        super().__init__(
            f"the log was expected to end with event {expected} and ends with {now}",
            hint="read the new events, decide again",
        )


class Store(Protocol):
    """What any store of the control plane does; `conformance.check_store` is its contract in code.

    Every call that changes something returns when it is on disk; all may be called from any thread.
    `shared` says that other processes append to the same log.
    """

    shared: bool

    def append(self, events: Sequence[Event], expected: int | None = None) -> int:
        """Append events, all or none, in order; return the number of the last one (the first ever is 1).

        Raises `LogMovedError`, and appends nothing, where the log does not end with event `expected`. Within
        a `turn` they are on disk when that has ended, and nothing else is done in it afterwards.
        """

    def turn(self) -> AbstractContextManager[None]:
        """Have the log to oneself: nobody else appends before the turn has ended."""

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield the events numbered above `after`, in order, each with its number."""

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Take over metrics; one of a (job, attempt, rank, step) already stored is dropped."""

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000) -> MetricsPage:
        """Return at most `limit` metrics of a job behind the cursor `after`, in order of arrival."""

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Take over log text; bytes already stored of a (job, attempt, rank) are dropped."""

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return at most `limit` chunks of a job (of one rank) behind the cursor `after`, as they arrived."""

    def forget(self, job_id: str) -> None:
        """Drop a job's metrics and logs."""

    def put_token(self, token: StoredToken) -> None:
        """Keep a token; the same digest again replaces it."""

    def find_token(self, digest: str) -> StoredToken | None:
        """Return the token of a digest, if it is known."""

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token, oldest first."""

    def close(self) -> None:
        """Let go of files and threads; may be called twice."""


class MemoryStore:
    """A store that forgets everything with its process: for tests. Events are kept in their written form."""

    shared = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[str] = []
        self._metrics: dict[tuple[str, int, int, int], tuple[int, StepMetrics]] = {}
        self._logs: list[tuple[int, LogChunk]] = []
        self._tokens: dict[str, StoredToken] = {}
        self._arrivals = 0

    def append(self, events: Sequence[Event], expected: int | None = None) -> int:
        """Append events; see `Store`."""
        with self._lock:
            if expected is not None and expected != len(self._events):
                raise LogMovedError(expected, len(self._events))
            self._events.extend([encode(event) for event in events])
            return len(self._events)

    def turn(self) -> AbstractContextManager[None]:
        """Do nothing: the log is this process's own."""
        return nullcontext()

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield events; see `Store`."""
        for number, text in enumerate(self._events[after:], start=after + 1):
            yield number, decode(text)

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Take over metrics; see `Store`."""
        with self._lock:
            for one in metrics:
                self._arrivals += 1
                self._metrics.setdefault((one.job, one.attempt, one.rank, one.step), (self._arrivals, one))

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000) -> MetricsPage:
        """Return metrics; see `Store`."""
        mine = [(at, one) for at, one in self._metrics.values() if one.job == job_id and at > after][:limit]
        return MetricsPage(metrics=tuple(one for _, one in mine), next=mine[-1][0] if mine else after)

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Take over log text; see `Store`."""
        with self._lock:
            for chunk in chunks:
                same = (one for _, one in self._logs if _stream(one) == _stream(chunk))
                fresh = cut_overlap(chunk, max(map(log_end, same), default=0))
                if fresh is not None:
                    self._arrivals += 1
                    self._logs.append((self._arrivals, fresh))

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return log text; see `Store`."""
        mine = [
            (at, one)
            for at, one in self._logs
            if one.job == job_id and at > after and rank in (None, one.rank)
        ][:limit]
        return LogPage(chunks=tuple(one for _, one in mine), next=mine[-1][0] if mine else after)

    def forget(self, job_id: str) -> None:
        """Drop a job's metrics and logs; see `Store`."""
        with self._lock:
            self._metrics = {key: one for key, one in self._metrics.items() if key[0] != job_id}
            self._logs = [(at, one) for at, one in self._logs if one.job != job_id]

    def put_token(self, token: StoredToken) -> None:
        """Keep a token; see `Store`."""
        with self._lock:
            self._tokens[token.digest] = token

    def find_token(self, digest: str) -> StoredToken | None:
        """Return a token; see `Store`."""
        return self._tokens.get(digest)

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token; see `Store`."""
        return tuple(sorted(self._tokens.values(), key=lambda token: token.created_s))

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


def _stream(chunk: LogChunk) -> tuple[str, int, int]:
    return chunk.job, chunk.attempt, chunk.rank


def log_end(chunk: LogChunk) -> int:
    """Return the offset, in bytes of UTF-8, behind a chunk's last byte."""
    return chunk.offset + len(chunk.text.encode("utf-8"))


def cut_overlap(chunk: LogChunk, stored_bytes: int) -> LogChunk | None:
    """Return what of `chunk` lies behind the `stored_bytes` already kept of its log; None if nothing does."""
    if chunk.offset >= stored_bytes:
        return chunk if chunk.text else None
    rest = chunk.text.encode("utf-8")[stored_bytes - chunk.offset :]
    if not rest:
        return None
    return chunk.model_copy(update={"offset": stored_bytes, "text": rest.decode("utf-8", errors="replace")})
