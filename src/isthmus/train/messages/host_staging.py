"""`HostStaging`: tensors of a device by way of host memory, for process groups that carry nothing else.

What is sent leaves the device on a stream of its own, which waits for what makes it, and is handed to the
network by the thread that starts exchanges. What is received goes to the device on another stream as soon as
it has come, by a thread that waits for it. The computing thread starts copies and waits for what it needs;
its stream computes meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import torch

from isthmus.train.messages.pinned_memory import host_room

LANDINGS = 8
"""Receives that threads wait for; beyond these the one who needs a message waits and copies by itself."""

Interval: TypeAlias = "tuple[float, float]"
Clock = Callable[[], float]


class Waitable(Protocol):
    """What a receive is known by; it may say from when to when its message was `under_way`."""

    def wait(self) -> Any:
        """Block until the message is in host memory; raises what the receive raises."""
        ...


class Copies(Protocol):
    """Copies between a device and host memory, beside its computing.

    A mark is a point in the device's work. Threads share one such object.
    """

    def mark(self) -> Any:
        """Return the point behind all that the calling thread has asked the device to compute."""
        ...

    def start(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        """Copy once the device has come to the mark `after`; return at once, with the mark of the end."""
        ...

    def end(self, mark: Any) -> None:
        """Block until the device has come to `mark`."""
        ...


class DeviceCopies:
    """Copies of a CUDA device: one stream out of it and one into it, so that each has an engine of its own.

    Memory that is copied from or to is not given to others before the copy has ended, whoever frees it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind what the calling thread has asked the device to compute."""
        return torch.cuda.current_stream(self._device).record_event()

    def start(self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Copy from or to pinned memory after an event; return the event of the end."""
        stream, on_device = (self._in, target) if target.is_cuda else (self._out, source)
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
        on_device.record_stream(stream)
        return stream.record_event(torch.cuda.Event(blocking=True))

    def end(self, mark: torch.cuda.Event) -> None:
        """Block until an event, asleep: the core is free for those who compute."""
        mark.synchronize()


class Landing:
    """A receive into host memory and on to the device; what is `under_way` includes the last copy.

    It is the part of `dist.Work` that the runtime uses.
    """

    def __init__(self, land: Callable[[], Interval | None], pool: ThreadPoolExecutor) -> None:
        self._land, self._future = land, pool.submit(land)
        self._landed = False
        self.under_way: Interval | None = None

    def is_completed(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._landed or (self._future.done() and not self._future.cancelled())

    def wait(self) -> bool:
        """Block until the message is on the device; raises what the receive raises."""
        if not self._landed:
            # Where no thread has come to it, nobody else does it: waits need no order among receives.
            self.under_way = self._land() if self._future.cancel() else self._future.result()
            self._landed = True
        return True


class HostStaging:
    """Messages of a device that are sent from host memory and received there."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._pool = ThreadPoolExecutor(LANDINGS, thread_name_prefix="isthmus-landing")

    def leave(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Begin to copy `tensor` out; return the copy, and what to call before it is read.

        For the thread that computes `tensor`, which nobody changes before.
        """
        host = host_room(tensor)
        mark = self._copies.start(tensor.detach(), host, self._copies.mark())
        return host, lambda: self._copies.end(mark)

    def land(
        self, target: torch.Tensor, receive: Callable[[torch.Tensor], Waitable], clock: Clock = time.time
    ) -> Landing:
        """Begin to receive into `target`, by way of host memory that `receive` is given.

        For the thread that computes with `target`, which is free once what that thread has asked for so far
        is done.
        """
        host, free = host_room(target), self._copies.mark()
        work = receive(host)

        def land() -> Interval | None:
            work.wait()
            self._copies.end(self._copies.start(host, target, free))
            sent_to_arrived: Interval | None = getattr(work, "under_way", None)
            return None if sent_to_arrived is None else (sent_to_arrived[0], clock())

        return Landing(land, self._pool)
