"""`Work` objects of collectives: over the transport, by gloo inside a cluster, and several as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import IsthmusWork, gloo_error_text
from isthmus.comm.group.transport_messages import ArrivedMessage
from isthmus.core.errors import PeerError


class CollectiveWork(IsthmusWork):
    """A collective over the transport; threads of the group run it. `arrived` are its messages, after `wait`."""

    arrived: Sequence[ArrivedMessage] = ()

    def _finish(self, result: Sequence[ArrivedMessage] | None) -> None:
        self.arrived = result or ()


class LocalWork(dist.Work):  # type: ignore[misc]
    """A collective of gloo inside a cluster, with errors raised as `PeerError`; `finish` stores its results once.

    `loss_message()` returns the loss that the transport knows of, or "".
    """

    def __init__(
        self,
        work: dist.Work,
        operation: str,
        loss_message: Callable[[], str],
        tensors: list[torch.Tensor],
        finish: Callable[[], None],
    ) -> None:
        super().__init__()
        self._work, self._operation, self._loss_message = work, operation, loss_message
        self._tensors, self._finish = tensors, finish
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raise `PeerError` if a peer is lost or `timeout` passes."""
        if not self._done:
            try:
                if timeout:
                    self._work.wait(timeout)
                else:
                    self._work.wait()
            except RuntimeError as error:
                raise self._lost(error) from error
            self._store()
        return True

    def is_completed(self) -> bool:
        """Return whether gloo is done."""
        return self._done or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self.is_completed() and bool(self._work.is_success())

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the operation's tensors, each of the shape that was passed in."""
        future: torch.futures.Future[list[torch.Tensor]] = self._work.get_future().then(self._result)
        return future

    def _result(self, done: torch.futures.Future[object]) -> list[torch.Tensor]:
        """Return the tensors; gloo calls this before its work counts as done, so it must not wait for the work."""
        try:
            done.value()
        except RuntimeError as error:
            raise self._lost(error) from error
        self._store()
        return self._tensors

    def _store(self) -> None:
        """Store the results once; the lock is free while a thread waits for gloo, which may wait for `_result`."""
        with self._lock:
            if not self._done:
                self._finish()
                self._done = True

    def _lost(self, error: RuntimeError) -> PeerError:
        reason = self._loss_message() or gloo_error_text(error) or str(error)
        return PeerError(f"{self._operation}: {reason}")


class JoinedWork(dist.Work):  # type: ignore[misc]
    """Several operations as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are done; raise the first error."""
        for one in self._works:
            one.wait(timeout) if timeout else one.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether all are done."""
        return all(one.is_completed() for one in self._works)

    def is_success(self) -> bool:
        """Return whether all have succeeded."""
        return all(one.is_success() for one in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of all operations' tensors, each of the shape that was passed in."""
        result: torch.futures.Future[list[torch.Tensor]] = torch.futures.collect_all(
            [one.get_future() for one in self._works]
        ).then(lambda done: [tensor for one in done.value() for tensor in one.value()])
        return result
