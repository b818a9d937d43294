"""`Store`: the interface to the control plane's durable storage, and `MemoryStore` for tests."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

from isthmus.control.state.events import Event, NoticeDue, decode_event, encode_event
from isthmus.control.store.base_table import BaseTable, MemoryBaseTable
from isthmus.control.store.log_base import LogCompactedError
from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.errors import ConflictError
from isthmus.core.messages.agent_messages import LogChunk, StepMetrics
from isthmus.core.views.access_views import AuditFilter, AuditRecord
from isthmus.core.views.api_views import LogPage, MetricsPage
from isthmus.core.views.audit_chain import PRUNED, audit_start, line_end, next_line

SECRET_BYTES = 32


class StoredToken(FrozenModel):
    """A token as it is stored: role, name and SHA-256 digest, never the token itself.

    Times are seconds since the epoch; `created_by` names the creator. A token counts until it expires or is revoked.
    """

    role: str
    name: Name
    digest: str
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    created_by: str = ""
    # Grants priority `high` to the jobs that are submitted with it.
    high: bool = False
    # The cluster whose agent has it as its key, and may act for no other; "" for tokens of persons.
    site: str = ""
    # The id of the key that it replaces, which ends when this one is used.
    replaces: str = ""
    # The digest of the token that signed in to the console, for a session of it; "" for a token by itself.
    session_of: str = ""

    @property
    def id(self) -> str:
        """Return the public id: the start of the digest, from which the token cannot be found."""
        return f"t-{self.digest[:12]}"

    def is_valid(self, now_s: float) -> bool:
        """Return whether the token counts at `now_s`."""
        return all(end_s is None or now_s < end_s for end_s in (self.expires_s, self.revoked_s))


class StoredNotice(NamedTuple):
    """A notice that waits for its delivery; `batch` is the message that it belongs to, 0 before it has one."""

    number: int
    due: NoticeDue
    batch: int = 0


class LogMovedError(ConflictError):
    """The log does not end where the appending server expected."""

    def __init__(self, expected: int, found: int | None = None) -> None:
        now = "another number" if found is None else f"number {found}"
        super().__init__(
            f"the log was expected to end with event {expected} and ends with {now}",
            hint="read the new events and decide again",
        )


class Store(Protocol):
    """Interface of the control plane's stores; `check_store` tests an implementation.

    Every write returns once it is on disk; all methods are thread-safe. `shared` is true if other processes
    append to the same log.
    """

    shared: bool
    bases: BaseTable
    # Its identity, from which the chains of its logs follow.
    store_id: str

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        """Append events in order, all or none; return the number of the last event (the first ever is 1).

        The records `audit` join the audit log, and `notices` those to deliver, in the same transaction. Raises
        `LogMovedError` and appends nothing if the log does not end with event `expected_last`. Inside a
        `exclusive_access` the append must be the last operation; it is on disk when the turn ends.
        """

    def exclusive_access(self) -> AbstractContextManager[None]:
        """Lock the log for this process until the context exits."""

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield the events numbered above `after`, in order, each with its number.

        With `after` 0 they begin behind the active base. Raises `LogCompactedError` if compaction has dropped some.
        """

    def digest_at(self, number: int) -> bytes | None:
        """Return the hash of the log up to event `number`, None if the log has no such event."""

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Store metrics; duplicates of a stored (job, attempt, rank, step) are dropped."""

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000, *, newest: bool = False) -> MetricsPage:
        """Return at most `limit` metrics of a job after the cursor `after`, in order of arrival (see `take_page`).

        These are the first ones after the cursor, or with `newest` the last ones.
        """

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Store log text; bytes already stored for a (job, attempt, rank) are dropped."""

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return at most `limit` chunks of a job (of one rank) after the cursor `after`, in the order of arrival.

        A page is bounded in bytes as well (`take_page`).
        """

    def output_size(self, job_id: str) -> tuple[int, int]:
        """Return how many metrics of a job are stored, and how many bytes of log."""

    def delete_job_output(self, job_id: str) -> None:
        """Delete a job's metrics and logs."""

    def put_token(self, token: StoredToken, audit: Sequence[AuditRecord] = ()) -> None:
        """Store a token; it replaces one with the same digest. The records `audit` join the audit log with it."""

    def find_token(self, digest: str) -> StoredToken | None:
        """Return the token of a digest, None if unknown."""

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token, oldest first."""

    def prune_sessions(self, ended_s: float) -> None:
        """Delete the sessions of the console that have expired before `ended_s`; no other token."""

    def secret(self, name: str) -> bytes:
        """Return the secret `name`: 32 random bytes, made at its first use, the same for all servers of the store."""

    def token_version(self) -> tuple[float, ...]:
        """Return numbers that differ after every change of a token: a cheap question for what `tokens` returns."""

    def append_audit(self, records: Sequence[AuditRecord]) -> None:
        """Append records to the audit log, each with the next number and hash. Nothing changes one later."""

    def audit(
        self, wanted: AuditFilter, after: int = 0, limit: int = 1000, *, oldest: bool = False
    ) -> tuple[AuditRecord, ...]:
        """Return at most `limit` records that meet `wanted`: the first ones numbered above `after`, in order.

        Without `after` they are the newest ones, or with `oldest` the oldest.
        """

    def prune_audit(self, before_s: float, now_s: float) -> None:
        """Delete the first records as far as they are of the time before `before_s`, and append what was deleted."""

    def notices(self, after: int = 0, limit: int = 1000) -> tuple[StoredNotice, ...]:
        """Return at most `limit` notices that wait for their delivery, numbered above `after`, in order."""

    def batch_notices(self, batch: int, numbers: Sequence[int]) -> None:
        """Put notices into one message, which keeps its number when it is sent again."""

    def delete_notices(self, numbers: Sequence[int]) -> None:
        """Delete notices that were delivered or given up."""

    def close(self) -> None:
        """Release files and connections; may be called twice."""


class MemoryStore:
    """A `Store` in memory, for tests. Events are kept in encoded form."""

    shared = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[int, str] = {}
        self._num_events = 0
        self.bases: BaseTable = MemoryBaseTable(self._events)
        self._metrics: dict[tuple[str, int, int, int], tuple[int, StepMetrics]] = {}
        self._logs: list[tuple[int, LogChunk]] = []
        self._tokens: dict[str, StoredToken] = {}
        self._secrets: dict[str, bytes] = {}
        self._num_arrivals = 0
        self._audit: list[AuditRecord] = []
        self.store_id = secrets.token_hex(16)
        self._notices: dict[int, StoredNotice] = {}
        self._num_notices = 0

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        """Append events; see `Store`."""
        with self._lock:
            if expected_last is not None and expected_last != self._num_events:
                raise LogMovedError(expected_last, self._num_events)
            for event in events:
                self._num_events += 1
                self._events[self._num_events] = encode_event(event)
            self._append_lines(audit)
            for due in notices:
                self._num_notices += 1
                self._notices[self._num_notices] = StoredNotice(self._num_notices, due)
            return self._num_events

    def exclusive_access(self) -> AbstractContextManager[None]:
        """Do nothing: the log belongs to this process."""
        return nullcontext()

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield events; see `Store`."""
        base = self.bases.active_end()
        if base is not None and 0 < after < base.number:
            raise LogCompactedError(after, base.number)
        first = max(after, base.number if base else 0) + 1
        for number in range(first, self._num_events + 1):
            yield number, decode_event(self._events[number])

    def digest_at(self, number: int) -> bytes | None:
        """Return the hash of an event, which in memory is not chained to those before; see `Store`."""
        text = self._events.get(number)
        return None if text is None else hashlib.sha256(text.encode()).digest()

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Store metrics; see `Store`."""
        with self._lock:
            for one in metrics:
                self._num_arrivals += 1
                self._metrics.setdefault((one.job, one.attempt, one.rank, one.step), (self._num_arrivals, one))

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000, *, newest: bool = False) -> MetricsPage:
        """Return metrics; see `Store`."""
        mine = [(at, one) for at, one in self._metrics.values() if one.job == job_id and at > after]
        rows = ((at, one, one.model_dump_json()) for at, one in (reversed(mine) if newest else mine))
        mine = sorted((at, one) for at, one, _ in take_page(rows, limit))
        return MetricsPage(metrics=tuple(one for _, one in mine), next=mine[-1][0] if mine else after)

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Store log text; see `Store`."""
        with self._lock:
            for chunk in chunks:
                same = (one for _, one in self._logs if _log_key(one) == _log_key(chunk))
                fresh = trim_stored_bytes(chunk, max(map(chunk_end_bytes, same), default=0))
                if fresh is not None:
                    self._num_arrivals += 1
                    self._logs.append((self._num_arrivals, fresh))

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return log text; see `Store`."""
        rows = (
            (at, one, one.text)
            for at, one in self._logs
            if one.job == job_id and at > after and rank in (None, one.rank)
        )
        mine = [(at, one) for at, one, _ in take_page(rows, limit)]
        return LogPage(chunks=tuple(one for _, one in mine), next=mine[-1][0] if mine else after)

    def output_size(self, job_id: str) -> tuple[int, int]:
        """Return the size of a job's output; see `Store`."""
        num_lines = sum(job == job_id for job, *_ in self._metrics)
        return num_lines, sum(len(one.text.encode()) for _, one in self._logs if one.job == job_id)

    def delete_job_output(self, job_id: str) -> None:
        """Delete a job's metrics and logs; see `Store`."""
        with self._lock:
            self._metrics = {key: one for key, one in self._metrics.items() if key[0] != job_id}
            self._logs = [(at, one) for at, one in self._logs if one.job != job_id]

    def put_token(self, token: StoredToken, audit: Sequence[AuditRecord] = ()) -> None:
        """Store a token; see `Store`."""
        with self._lock:
            self._tokens[token.digest] = token
            self._append_lines(audit)

    def find_token(self, digest: str) -> StoredToken | None:
        """Return a token; see `Store`."""
        return self._tokens.get(digest)

    def tokens(self) -> tuple[StoredToken, ...]:
        """Return every token; see `Store`."""
        return tuple(sorted(self._tokens.values(), key=lambda token: token.created_s))

    def prune_sessions(self, ended_s: float) -> None:
        """Delete ended sessions; see `Store`."""
        with self._lock:
            self._tokens = {
                digest: one
                for digest, one in self._tokens.items()
                if not one.session_of or one.expires_s is None or one.expires_s >= ended_s
            }

    def secret(self, name: str) -> bytes:
        """Return a secret; see `Store`."""
        with self._lock:
            return self._secrets.setdefault(name, secrets.token_bytes(SECRET_BYTES))

    def token_version(self) -> tuple[float, ...]:
        """Return numbers that differ after a change; see `Store`."""
        return token_version(self.tokens())

    def append_audit(self, records: Sequence[AuditRecord]) -> None:
        """Append records; see `Store`."""
        with self._lock:
            self._append_lines(records)

    def _append_lines(self, records: Sequence[AuditRecord]) -> None:
        for record in records:
            end = line_end(self._audit[-1]) if self._audit else audit_start(self.store_id)
            self._audit.append(next_line(end, record))

    def audit(
        self, wanted: AuditFilter, after: int = 0, limit: int = 1000, *, oldest: bool = False
    ) -> tuple[AuditRecord, ...]:
        """Return records; see `Store`."""
        found = [one for one in self._audit if one.number > after and _meets(one, wanted)]
        return tuple(found[:limit] if after or oldest else found[-limit:])

    def prune_audit(self, before_s: float, now_s: float) -> None:
        """Delete old records; see `Store`."""
        with self._lock:
            old = list(takewhile(lambda one: one.at_s < before_s, self._audit))
            if old:
                last = str(old[-1].number)
                record = AuditRecord(at_s=now_s, action=PRUNED, actor="server", subject=last, detail=old[-1].hash)
                self._append_lines([record])
                self._audit = self._audit[len(old) :]

    def notices(self, after: int = 0, limit: int = 1000) -> tuple[StoredNotice, ...]:
        """Return notices; see `Store`."""
        with self._lock:
            return tuple(islice((one for number, one in self._notices.items() if number > after), limit))

    def batch_notices(self, batch: int, numbers: Sequence[int]) -> None:
        """Put notices into one message; see `Store`."""
        with self._lock:
            for number in numbers:
                self._notices[number] = self._notices[number]._replace(batch=batch)

    def delete_notices(self, numbers: Sequence[int]) -> None:
        """Delete notices; see `Store`."""
        with self._lock:
            for number in numbers:
                self._notices.pop(number, None)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


MAX_PAGE_BYTES = 8 << 20
"""Size of a page of metrics or logs, unless one entry is larger: callers choose the number of entries alone."""
_Row = TypeVar("_Row", bound=tuple[Any, ...])


def take_page(rows: Iterable[_Row], limit: int) -> list[_Row]:
    """Return the first rows, at most `limit`, whose bodies have `MAX_PAGE_BYTES` together; one at least.

    The body is the last value of a row.
    """
    found, left_bytes = list[_Row](), MAX_PAGE_BYTES
    for row in islice(rows, limit):
        left_bytes -= len(row[-1])
        if found and left_bytes < 0:
            break
        found.append(row)
    return found


MAX_LOG_GAP_BYTES = 2**30
"""Largest gap in a log, as after a restored database; text beyond it would hide what is still missing."""


def token_version(tokens: Sequence[StoredToken]) -> tuple[float, ...]:
    """Return the count of tokens, of revoked ones, and the sums of the times that a change moves."""
    return (
        len(tokens),
        sum(token.revoked_s is not None for token in tokens),
        sum(token.created_s for token in tokens),
        sum(token.expires_s or 0.0 for token in tokens),
        sum(token.high for token in tokens),
    )


def _meets(record: AuditRecord, wanted: AuditFilter) -> bool:
    """Return whether a record meets a filter."""
    if wanted.since_s is not None and record.at_s < wanted.since_s:
        return False
    return wanted.user is None or wanted.user in (record.actor, record.subject)


def _log_key(chunk: LogChunk) -> tuple[str, int, int]:
    return chunk.job, chunk.attempt, chunk.rank


def chunk_end_bytes(chunk: LogChunk) -> int:
    """Return the offset after a chunk's last byte, in bytes of UTF-8."""
    return chunk.offset + len(chunk.text.encode("utf-8"))


def trim_stored_bytes(chunk: LogChunk, stored_bytes: int) -> LogChunk | None:
    """Return the part of `chunk` after the first `stored_bytes` of its log, None if it is empty or far ahead."""
    if chunk.offset - stored_bytes > MAX_LOG_GAP_BYTES:
        return None
    if chunk.offset >= stored_bytes:
        return chunk if chunk.text else None
    rest = chunk.text.encode("utf-8")[stored_bytes - chunk.offset :]
    if not rest:
        return None
    return chunk.model_copy(update={"offset": stored_bytes, "text": rest.decode("utf-8", errors="replace")})
