"""`SendThread`: a thread that starts messages, so that the computing thread only queues them.

Starting a message takes up to 1 ms: gloo writes to the socket in the calling thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

import torch.distributed as dist

from isthmus.comm.transport.transport import Arrival

_Message = TypeVar("_Message")


class PendingWork(Generic[_Message]):
    """A message queued to the send thread, with the interface of `dist.Work`."""

    def __init__(self, message: _Message) -> None:
        self.message = message
        self._work: dist.Work | None = None
        self._error: BaseException | None = None
        self._started = threading.Lock()
        self._started.acquire()

    def started_work(self) -> dist.Work:
        """Wait until the message has started; return its work. Raises the error of starting it."""
        with self._started:
            if self._error is not None:
                raise self._error
            return self._work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is complete; raises the error of its work."""
        work = self.started_work()
        return bool(work.wait() if timeout is None else work.wait(timeout))

    def is_completed(self) -> bool:
        """Return whether the message is known to be complete."""
        return self._work is not None and bool(self._work.is_completed())

    @property
    def under_way(self) -> tuple[float, float] | None:
        """When the message was in transit (start, end; epoch seconds), if its work knows."""
        return getattr(self._work, "under_way", None)

    @property
    def arrival(self) -> Arrival | None:
        """The times of a received message, if its work knows them."""
        return getattr(self._work, "arrival", None)

    def start(self, start: Callable[[_Message], dist.Work]) -> None:
        """Start the message, once; `started_work` raises the error, if any."""
        try:
            self._work = start(self.message)
        except BaseException as error:
            self._error = error
        self._started.release()


def unwrap_work(work: object) -> object:
    """Return the work inside a `PendingWork`, once it has started; any other work unchanged."""
    return work.started_work() if isinstance(work, PendingWork) else work


class SendThread(Generic[_Message]):
    """Starts messages in order, in a thread that lives from the first message until this object is freed."""

    def __init__(self) -> None:
        self._queue: _Queue[_Message] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(
        self, messages: Sequence[_Message], start: Callable[[_Message], dist.Work]
    ) -> list[PendingWork[_Message]]:
        """Queue `messages`, which the thread starts with `start`; return their work handles at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run_queue, args=(self._queue,), name="isthmus-poster", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        posted = [PendingWork(one) for one in messages]
        self._queue.put((posted, start))
        return posted

    def drain(self) -> None:
        """Wait until every queued message has started or failed."""
        if self._thread is not None:
            reached = threading.Event()
            self._queue.put(reached)
            reached.wait()


_Submission: TypeAlias = tuple[list[PendingWork[_Message]], Callable[[_Message], dist.Work]]
_Queue: TypeAlias = "SimpleQueue[_Submission[_Message] | threading.Event | None]"


def _run_queue(queue: _Queue[_Message]) -> None:
    while _process_item(queue.get()):
        pass  # `_process_item` drops its references before the next wait


def _process_item(item: _Submission[_Message] | threading.Event | None) -> bool:
    """Process one queue item; return False for the end of the queue."""
    if isinstance(item, threading.Event):
        item.set()
    elif item is not None:
        posted, start = item
        for one in posted:
            one.start(start)
    return item is not None
