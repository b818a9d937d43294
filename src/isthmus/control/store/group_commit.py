"""`GroupCommit`: concurrent writes share one transaction and one flush.

The thread that gets the lock commits all queued writes; there is no background thread to stop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from isthmus.core.errors import UnavailableError

Session = TypeVar("Session")


class _PendingWrite(Generic[Session]):
    """A queued write and, once done, its result or error."""

    def __init__(self, write: Callable[[Session], Any]) -> None:
        self.write, self.done = write, False
        self.result: Any = None
        self.error: Exception | None = None


class GroupCommit(Generic[Session]):
    """Commits writes of many threads in batches.

    `commit` runs writes in one transaction and returns their results, or raises and rolls back. An error of a
    type in `data_errors` concerns one write's data: the writes of that batch are then retried one by one.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Callable[[Session], Any]]], list[Any]],
        data_errors: tuple[type[Exception], ...],
    ) -> None:
        self.lock = threading.Lock()
        self.queue: list[_PendingWrite[Session]] = []
        self._commit_batch, self._data_errors = commit, data_errors
        self._queue_lock = threading.Lock()

    def write(self, write: Callable[[Session], Any]) -> Any:
        """Queue `write`, wait until it is committed, and return its result or raise its error."""
        ticket = _PendingWrite(write)
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
        self._commit_writes(batch)
        if len(batch) > 1 and isinstance(batch[0].error, self._data_errors):
            for ticket in batch:
                self._commit_writes([ticket])

    def _commit_writes(self, batch: list[_PendingWrite[Session]]) -> None:
        """Commit writes in one transaction; an error fails all of them."""
        outcome: Exception | None = UnavailableError("a write to the store was interrupted")
        try:
            for ticket, result in zip(batch, self._commit_batch([one.write for one in batch]), strict=True):
                ticket.result = result
            outcome = None
        except Exception as error:
            outcome = error
        finally:
            for ticket in batch:
                ticket.done, ticket.error = True, outcome
