"""`Work` objects of the isthmus process group, whose errors name the operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.transport.transport import Arrival
from isthmus.core.errors import IsthmusError, PeerError
from isthmus.core.process.steady_clock import steady_time_s


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any shape, without a copy."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def tensor_label(tensor: torch.Tensor) -> str:
    """Return dtype and shape, such as `float32[2,8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def gloo_error_text(error: RuntimeError) -> str:
    """Return the first sentence of a gloo error, without the source location."""
    return str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]


class IsthmusWork(dist.Work):  # type: ignore[misc]
    """One asynchronous operation; `operation` names it in errors. `wait` may be called repeatedly.

    After `wait`, `under_way` is the interval in which the network had the message: epoch seconds on this
    rank's clock, None if unknown. A receive also has all times of its `arrival`.
    """

    under_way: tuple[float, float] | None = None
    arrival: Arrival | None = None

    def __init__(self, future: Future[Any], operation: str, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future, self._operation, self._tensors = future, operation, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raise `PeerError` if a peer is lost or `timeout` passes."""
        limit_s = None if not timeout else timeout.total_seconds()
        try:
            result = self._future.result(limit_s)
        except FutureTimeoutError as error:
            raise PeerError(f"{self._operation}: not done within {limit_s:g} s") from error
        except PeerError as error:
            raise PeerError(f"{self._operation}: {error.message}", hint=error.hint) from error
        self._finish(result)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return immediately."""
        return self._future.done()

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self._future.done() and self._future.exception() is None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the operation's tensors, each of the shape that was passed in."""
        result: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def pass_on(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self._finish(done.result())
                result.set_result(self._tensors)
            else:
                result.set_exception(IsthmusError(f"{self._operation}: {error}"))

        self._future.add_done_callback(pass_on)
        return result

    def _finish(self, result: Any) -> None:
        """Post-process the result of a successful operation."""


class SendWork(IsthmusWork):
    """A send; holds the tensor until the message is acknowledged."""

    def __init__(self, future: Future[None], operation: str, tensor: torch.Tensor) -> None:
        super().__init__(future, operation, [tensor])
        self._start_s = steady_time_s()

    def _finish(self, result: Any) -> None:
        del result
        self.under_way = self.under_way or (self._start_s, steady_time_s())


class ReceiveWork(IsthmusWork):
    """A receive into `target`: `tensor` itself, or a contiguous buffer that is copied to it."""

    def __init__(self, future: Future[Arrival], operation: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
        super().__init__(future, operation, [tensor])
        self._target = target

    def _finish(self, result: Any) -> None:
        self.arrival = result
        self.under_way = result.sent_s, result.arrived_s
        if self._target is not self._tensors[0]:
            self._tensors[0].copy_(self._target)


class AnySourceWork(IsthmusWork):
    """A receive from any rank of the group `ranks`, ranks of the transport; see `ReceiveWork`.

    After `wait`, `source` is the sender's rank in the group.
    """

    def __init__(
        self,
        future: Future[tuple[int, Arrival]],
        operation: str,
        tensor: torch.Tensor,
        target: torch.Tensor,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(future, operation, [tensor])
        self._target, self._ranks = target, ranks
        self.source = -1

    def _finish(self, result: Any) -> None:
        source, self.arrival = result
        self.source = self._ranks.index(source)
        self.under_way = self.arrival.sent_s, self.arrival.arrived_s
        if self._target is not self._tensors[0]:
            self._tensors[0].copy_(self._target)

    def _source_rank(self) -> int:
        """Return `source`; torch asks for it."""
        return self.source


class GlooWork(dist.Work):  # type: ignore[misc]
    """A point-to-point operation inside a cluster: gloo's work, with errors raised as `PeerError`.

    Gloo's errors name no peer; `loss_message()` returns the loss that the transport knows of, or "". `ranks` has the
    rank in the process group of each rank of gloo's.
    """

    def __init__(
        self,
        work: dist.Work,
        operation: str,
        loss_message: Callable[[], str],
        tensor: torch.Tensor,
        target: torch.Tensor | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._loss_message, self._ranks = loss_message, ranks
        self._work, self._operation, self._tensor, self._target = work, operation, tensor, target
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done; raise `PeerError` if the peer is lost."""
        with self._lock:
            if self._done:
                return True
            try:
                if timeout:
                    self._work.wait(timeout)
                else:
                    self._work.wait()
            except RuntimeError as error:
                raise PeerError(f"{self._operation}: {self._loss_message() or gloo_error_text(error)}") from error
            if self._target is not None and self._target is not self._tensor:
                self._tensor.copy_(self._target)
            self._done = True
        return True

    @property
    def source(self) -> int:
        """The sender's rank in the group, after a receive from any rank."""
        return self._ranks[int(self._work._source_rank())]

    def _source_rank(self) -> int:
        """Return `source`; torch asks for it."""
        return self.source

    def is_completed(self) -> bool:
        """Return whether `wait` has succeeded: gloo reports completion only there."""
        return self._done

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return self._done

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, then return a completed future of the tensor, in the shape that was passed in."""
        self.wait()
        result: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        result.set_result([self._tensor])
        return result
