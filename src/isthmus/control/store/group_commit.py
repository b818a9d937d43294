"""Group commit: writes that wait together share one transaction and one flush.

Whoever gets the lock commits all that has queued up meanwhile. No thread of its own, so nothing to stop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from isthmus.core.errors import UnavailableError

Session = TypeVar("Session")


class _Ticket(Generic[Session]):
    """One queued write and, once done, its result or error."""

    def __init__(self, write: Callable[[Session], Any]) -> None:
        self.write, self.done = write, False
        self.result: Any = None
        self.error: Exception | None = None


class GroupCommit(Generic[Session]):
    """Writes of many threads, committed in batches.

    `commit` runs writes in one transaction and returns their results, or raises and keeps none of them.
    An error of a kind in `own` is about one write's data: those committed with it are then tried one by one.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Callable[[Session], Any]]], list[Any]],
        own: tuple[type[Exception], ...],
    ) -> None:
        self.lock = threading.Lock()
        self.queue: list[_Ticket[Session]] = []
        self._commit_all, self._own = commit, own
        self._queue_lock = threading.Lock()

    def write(self, write: Callable[[Session], Any]) -> Any:
        """Queue `write`, see it committed by whoever holds the lock, return its result or raise its error."""
        ticket = _Ticket(write)
        with self._queue_lock:
            self.queue.append(ticket)
        with self.lock:
            if not ticket.done:
                self._commit_queue()
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def _commit_queue(self) -> None:
        with self._queue_lock:
            batch, self.queue = self.queue, []
        self._commit(batch)
        if len(batch) > 1 and isinstance(batch[0].error, self._own):
            for ticket in batch:
                self._commit([ticket])

    def _commit(self, batch: list[_Ticket[Session]]) -> None:
        """Commit writes in one transaction; a failure fails them all."""
        outcome: Exception | None = UnavailableError("a write to the store was interrupted")
        try:
            for ticket, result in zip(batch, self._commit_all([one.write for one in batch]), strict=True):
                ticket.result = result
            outcome = None
        except Exception as error:
            outcome = error
        finally:
            for ticket in batch:
                ticket.done, ticket.error = True, outcome
