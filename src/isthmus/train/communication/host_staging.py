"""`HostStaging`: device tensors staged through host memory, for process groups that send only from there.

A send is copied to the host on its own stream, after the kernels that produce it; the send thread then starts
it. A receive is copied to the device on another stream as soon as it arrives, by a pool thread. Both overlap
with the computing stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import torch

from isthmus.core.process.steady_clock import steady_time_s
from isthmus.train.communication.pinned_memory import empty_host_tensor

MAX_STAGED_RECEIVES = 8
"""Threads that complete receives; a receive beyond these completes in the thread that waits for it."""

Interval: TypeAlias = "tuple[float, float]"
Clock = Callable[[], float]


class PendingReceive(Protocol):
    """The work handle of a receive; it may have `under_way`, when its message was in transit (s)."""

    def wait(self) -> Any:
        """Wait until the message is in host memory; raises the error of the receive."""
        ...


class CopyEngine(Protocol):
    """Asynchronous copies between a device and host memory; thread-safe. Marks are device events."""

    def record_event(self) -> Any:
        """Record an event after all work that the calling thread has queued on the device."""
        ...

    def copy_async(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        """Queue a copy between tensors of equal shape after the event `after`; return the event of its completion."""
        ...

    def wait_event(self, event: Any) -> None:
        """Wait until the device has reached the event `event`."""
        ...

    def order_after(self, event: Any) -> None:
        """Let work that the calling thread queues from now on begin after `event`, without a wait of the host."""
        ...


class CudaCopyEngine:
    """Copies of a CUDA device, on one stream per direction, so that each has its own copy engine.

    The allocator reuses the memory of a copy only after the copy completes (`record_stream`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def record_event(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy_async(self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Queue a copy from or to pinned memory, of equal shape, after an event; return the event of its completion."""
        stream, on_device = (self._to_device, target) if target.is_cuda else (self._to_host, source)
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
        on_device.record_stream(stream)
        return stream.record_event(torch.cuda.Event(blocking=True))

    def wait_event(self, event: torch.cuda.Event) -> None:
        """Wait for an event without spinning, which leaves the core to other threads."""
        event.synchronize()

    def order_after(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


class StagedReceive:
    """A receive into host memory and its copy to the device, with the interface of `dist.Work`.

    `complete` receives and queues the copy; `order_after` lets the waiting thread's work begin behind it. `under_way`
    (s) runs from the send until the copy is queued; `received_work` is the receive into host memory.
    """

    def __init__(
        self,
        received_work: PendingReceive,
        complete: Callable[[], tuple[Interval | None, Any]],
        order_after: Callable[[Any], None],
        pool: ThreadPoolExecutor,
    ) -> None:
        self.received_work, self._order_after = received_work, order_after
        self._complete, self._future = complete, pool.submit(complete)
        self._is_complete = False
        self.under_way: Interval | None = None

    def is_completed(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._is_complete or (self._future.done() and not self._future.cancelled())

    def wait(self) -> bool:
        """Wait for the message, whose copy the device makes before what is queued next; raises the receive's error."""
        if not self._is_complete:
            # If no pool thread has taken it, complete it here: receives may be waited for in any order.
            self.under_way, copied = self._complete() if self._future.cancel() else self._future.result()
            self._order_after(copied)
            self._is_complete = True
        return True


class HostStaging:
    """Copies of outgoing tensors to the host, and receives into the device through the host."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(MAX_STAGED_RECEIVES, thread_name_prefix="isthmus-landing")

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Start a copy of `tensor` to the host; return the copy (of its shape), and a function that waits for it.

        Call it in the thread that computes `tensor`; do not modify `tensor` before the copy is complete.
        """
        host = empty_host_tensor(tensor)
        mark = self._engine.copy_async(tensor.detach(), host, self._engine.record_event())
        return host, lambda: self._engine.wait_event(mark)

    def receive_to_device(
        self,
        target: torch.Tensor,
        receive: Callable[[torch.Tensor], PendingReceive],
        clock: Clock = steady_time_s,
    ) -> StagedReceive:
        """Start a receive into `target` through a host tensor of its shape that is passed to `receive`.

        Call it in the thread that computes with `target`; the copy starts after that thread's queued work.
        """
        host, free = empty_host_tensor(target), self._engine.record_event()
        work = receive(host)

        def land() -> tuple[Interval | None, Any]:
            work.wait()
            copied = self._engine.copy_async(host, target, free)
            in_transit: Interval | None = getattr(work, "under_way", None)
            return (None if in_transit is None else (in_transit[0], clock())), copied

        return StagedReceive(work, land, self._engine.order_after, self._pool)
