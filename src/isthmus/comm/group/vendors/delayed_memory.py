"""`DelayedMemory`: the memory and streams of a fake device, which executes everything as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class _Mark:
    """A place behind `queued` operations of a device."""

    device: torch.device
    queued: tuple[Callable[[], None], ...]


class DelayedMemory:
    """A fake device's memory: host memory has its values only after the wait, and is none of the device's.

    What `aside` queues is executed when a thread is ordered behind its mark. `host_copies` counts copies to and from
    host memory, `num_kept` calls of `keep`, one for each message between devices.
    """

    def __init__(self) -> None:
        self.host_copies = self.num_kept = 0
        self._thread, self._lock = threading.local(), threading.Lock()

    def record(self, device: torch.device) -> _Mark:
        """Return a mark behind what is queued on the current stream."""
        return _Mark(device, tuple(self._stream or ()))

    @property
    def _stream(self) -> list[Callable[[], None]] | None:
        """What is queued on the current stream; None on the first one of a thread, which executes at once."""
        return getattr(self._thread, "stream", None)

    def queue(self, run: Callable[[], object]) -> None:
        """Queue an operation on the current stream."""
        left = [run]

        def once() -> None:
            with self._lock:
                if left:
                    left.pop()()

        if self._stream is None:
            once()
        else:
            self._stream.append(once)

    @contextmanager
    def stream(self, device: torch.device, after: _Mark) -> Iterator[None]:
        """Check the mark, and execute what is queued behind it."""
        with self.aside(device, after):
            yield
            self.order_after(device, self.record(device))

    @contextmanager
    def aside(self, device: torch.device, after: _Mark) -> Iterator[None]:
        """Check the mark, and make a stream current that begins behind it."""
        if after.device != device:
            raise ValueError(f"a stream of {device} is queued behind {after!r}")
        before, self._thread.stream = self._stream, list(after.queued)
        try:
            yield
        finally:
            self._thread.stream = before

    def order_after(self, device: torch.device, mark: _Mark) -> None:
        """Execute what is queued before the mark: what the caller queues next is computed at once."""
        del device
        for one in mark.queued:
            one()

    def keep(self, tensor: torch.Tensor) -> None:
        """Count: what is queued holds `tensor` [N]."""
        del tensor
        with self._lock:
            self.num_kept += 1

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return True: `tensor`, of any shape, counts as one of the device."""
        del tensor
        return True

    def new_host(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory of the shape of `like` [N], with wrong values."""
        return torch.full_like(like, 7)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return host memory [N] without the values of `tensor` [N]; they come with the wait."""
        self._count()
        host = torch.full_like(tensor, 7)
        value = tensor.clone()

        def wait() -> None:
            host.copy_(value)

        return host, wait

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy `host` [N] to `tensor` [N]."""
        self._count()
        tensor.copy_(host)

    def _count(self) -> None:
        with self._lock:
            self.host_copies += 1


class LateWork(dist.Work):  # type: ignore[misc]
    """An operation that a device executes late: `run` is queued on the current stream by `wait`."""

    def __init__(self, memory: DelayedMemory, run: Callable[[], object]) -> None:
        super().__init__()
        self._memory, self._run = memory, run

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Queue the operation."""
        del timeout
        self._memory.queue(self._run)
        return True
