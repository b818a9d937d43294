"""The `Work` objects of the isthmus process group: waiting, futures, errors that name the operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import IsthmusError, PeerError


def payload_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, not copied."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def label_of(tensor: torch.Tensor) -> str:
    """Return type and shape, such as `float32[2,8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def gloo_reason(error: RuntimeError) -> str:
    """Return the first sentence of what gloo says, without the place in its source."""
    return str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]


class IsthmusWork(dist.Work):  # type: ignore[misc]
    """One operation under way; `what` names it in errors. Waiting twice is allowed.

    After the first `wait`, `under_way` says from when to when the network had the message: epoch seconds on
    our clock, None where that is not known.
    """

    under_way: tuple[float, float] | None = None

    def __init__(self, future: Future[Any], what: str, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future, self._what, self._tensors = future, what, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raise `PeerError` where a peer was lost or `timeout` has passed."""
        limit_s = None if not timeout else timeout.total_seconds()
        try:
            result = self._future.result(limit_s)
        except FutureTimeoutError as error:
            raise PeerError(f"{self._what}: not done within {limit_s:g} s") from error
        except PeerError as error:
            raise PeerError(f"{self._what}: {error.message}", hint=error.hint) from error
        self._finish(result)
        return True

    def is_completed(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._future.done()

    def is_success(self) -> bool:
        """Tell whether the operation has ended well."""
        return self._future.done() and self._future.exception() is None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors."""
        result: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def pass_on(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self._finish(done.result())
                result.set_result(self._tensors)
            else:
                result.set_exception(IsthmusError(f"{self._what}: {error}"))

        self._future.add_done_callback(pass_on)
        return result

    def _finish(self, result: Any) -> None:
        """Do what remains once the message is there."""


class SendWork(IsthmusWork):
    """A message handed to the network; holds the tensor until then."""

    def __init__(self, future: Future[None], what: str, tensor: torch.Tensor) -> None:
        super().__init__(future, what, [tensor])
        self._start_s = time.time()

    def _finish(self, result: Any) -> None:
        del result
        self.under_way = self.under_way or (self._start_s, time.time())


class ReceiveWork(IsthmusWork):
    """A message received into `target`, which is `tensor` unless that one is not contiguous."""

    def __init__(
        self, future: Future[Arrival], what: str, tensor: torch.Tensor, target: torch.Tensor
    ) -> None:
        super().__init__(future, what, [tensor])
        self._target = target

    def _finish(self, result: Any) -> None:
        self.under_way = result.sent_s, result.arrived_s
        if self._target is not self._tensors[0]:
            self._tensors[0].copy_(self._target)


class CollectiveWork(IsthmusWork):
    """A collective that runs in the group's own thread, one after the other."""


class GlooWork(dist.Work):  # type: ignore[misc]
    """An exchange inside a cluster: gloo's own work, with its errors turned into `PeerError`.

    `loss()` says what loss is behind such an error, where the transport knows: gloo names no peer.
    """

    def __init__(
        self,
        work: dist.Work,
        what: str,
        loss: Callable[[], str],
        tensor: torch.Tensor,
        target: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._loss = loss
        self._work, self._what, self._tensor, self._target = work, what, tensor, target
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raise `PeerError` where the peer was lost."""
        with self._lock:
            if self._done:
                return True
            try:
                if timeout:
                    self._work.wait(timeout)
                else:
                    self._work.wait()
            except RuntimeError as error:
                raise PeerError(f"{self._what}: {self._loss() or gloo_reason(error)}") from error
            if self._target is not None and self._target is not self._tensor:
                self._tensor.copy_(self._target)
            self._done = True
        return True

    def is_completed(self) -> bool:
        """Tell whether the operation is known to be done: gloo knows only once it has been waited for."""
        return self._done

    def is_success(self) -> bool:
        """Tell whether the operation has ended well."""
        return self._done

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, then return a future that is done."""
        self.wait()
        result: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        result.set_result([self._tensor])
        return result
