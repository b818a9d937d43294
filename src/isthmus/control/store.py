"""The store: what the control plane must not forget, behind one seam (`Store`); the embedded one is SQLite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from isthmus.control.events import Event
from isthmus.core.base import Frozen, Name
from isthmus.core.messages import LogChunk, StepMetrics
from isthmus.core.views import LogPage, MetricsPage, TokenRequest


class StoredToken(Frozen):
    """A token as it is kept: who it speaks for, and its hash, never itself."""

    role: str
    name: Name
    digest: str
    created_s: float


class Store(Protocol):
    """What any store of the control plane does; `conformance.check_store` is its contract in code.

    Every call that changes something returns when it is on disk; all may be called from any thread.
    """

    def append(self, events: Sequence[Event]) -> int:
        """Append events, all or none, in order; return the number of the last one (the first ever is 1)."""

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield the events numbered above `after`, in order, each with its number."""

    def append_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        """Take over metrics; one of a (job, attempt, rank, step) already stored is dropped."""

    def metrics(self, job_id: str, after: int = 0, limit: int = 1000) -> MetricsPage:
        """Return at most `limit` metrics of a job behind the cursor `after`, in order of arrival."""

    def append_logs(self, chunks: Sequence[LogChunk]) -> None:
        """Take over log text; bytes already stored of a (job, attempt, rank) are dropped."""

    def logs(self, job_id: str, after: int = 0, rank: int | None = None, limit: int = 1000) -> LogPage:
        """Return at most `limit` chunks of a job (of one rank) behind the cursor `after`, in order of arrival."""

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
