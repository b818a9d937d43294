"""`Poster`: starts exchanges in a thread of its own, so that the computing thread only hands them over.

Starting one takes torch and gloo up to 1 ms: gloo writes what the socket takes in the caller's thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

import torch.distributed as dist

_Message = TypeVar("_Message")


class Posted(Generic[_Message]):
    """An exchange that was handed over. It is the part of `dist.Work` that the runtime uses."""

    def __init__(self, message: _Message) -> None:
        self.message = message
        self._work: dist.Work | None = None
        self._error: BaseException | None = None
        self._begun = threading.Lock()
        self._begun.acquire()

    def work(self) -> dist.Work:
        """Wait until the exchange has begun, and return its work; raises what starting it raised."""
        with self._begun:
            if self._error is not None:
                raise self._error
            return self._work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the exchange is done; raises what its work raises."""
        work = self.work()
        return bool(work.wait() if timeout is None else work.wait(timeout))

    def is_completed(self) -> bool:
        """Tell whether the exchange is known to be done."""
        return self._work is not None and bool(self._work.is_completed())

    @property
    def under_way(self) -> tuple[float, float] | None:
        """From when to when the network had the message, where its work knows (epoch seconds)."""
        return getattr(self._work, "under_way", None)

    def begin(self, start: Callable[[_Message], dist.Work]) -> None:
        """Start the exchange, once; what that raises is for `work`."""
        try:
            self._work = start(self.message)
        except BaseException as error:
            self._error = error
        self._begun.release()


def begun(work: object) -> object:
    """Return the work below one that was handed over, once it has begun; any other is its own."""
    return work.work() if isinstance(work, Posted) else work


class Poster(Generic[_Message]):
    """Starts what it is given, in that order. Its thread begins with the first, and ends with the poster."""

    def __init__(self) -> None:
        self._queue: _Queue[_Message] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(
        self, messages: Sequence[_Message], start: Callable[[_Message], dist.Work]
    ) -> list[Posted[_Message]]:
        """Hand over `messages`, to be started by `start`; return at once, with what to wait for."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._queue,), name="isthmus-poster", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        posted = [Posted(one) for one in messages]
        self._queue.put((posted, start))
        return posted

    def drain(self) -> None:
        """Return once all that was handed over has begun, or has failed to."""
        if self._thread is not None:
            reached = threading.Event()
            self._queue.put(reached)
            reached.wait()


_Handed: TypeAlias = tuple[list[Posted[_Message]], Callable[[_Message], dist.Work]]
_Queue: TypeAlias = "SimpleQueue[_Handed[_Message] | threading.Event | None]"


def _run(queue: _Queue[_Message]) -> None:
    while _begin(queue.get()):
        pass  # while it waits it holds nothing of what was begun


def _begin(item: _Handed[_Message] | threading.Event | None) -> bool:
    """Do what was asked for; False where that is to end."""
    if isinstance(item, threading.Event):
        item.set()
    elif item is not None:
        posted, start = item
        for one in posted:
            one.begin(start)
    return item is not None
