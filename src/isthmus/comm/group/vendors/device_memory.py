"""`DeviceMemory`: the memory and streams of a device, as a group that spans clusters uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class DeviceMemory(Protocol):
    """Copies between a device and host memory, on streams; tensors are flat and contiguous."""

    def record(self, device: torch.device) -> Any:
        """Return a mark behind the work that the calling thread has queued on its current stream."""
        ...

    def stream(self, device: torch.device, after: Any) -> AbstractContextManager[None]:
        """Queue the work of the block on a stream of its own, behind the mark `after`; wait for it at the end."""
        ...

    def aside(self, device: torch.device, after: Any) -> AbstractContextManager[None]:
        """Queue the work of the block on a stream of its own, behind the mark `after`; nothing waits for it."""
        ...

    def order_after(self, device: torch.device, mark: Any) -> None:
        """Let what the calling thread queues next on its current stream begin behind `mark`; the host goes on."""
        ...

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor` [N] until the device has done what is queued on the current stream."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of any shape, is in the memory of the device."""
        ...

    def new_host(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised host memory of the size and dtype of `like` [N], for `to_device`."""
        ...

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Queue a copy of `tensor` [N]; return the host memory [N], and a function that waits until it is there.

        Any thread may call the function. Host memory itself is returned as it is.
        """
        ...

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Queue a copy of `host` [N], a result of `to_host` that stays until the end of the stream, to `tensor` [N]."""
        ...


class HostMemory:
    """The memory of a CPU: nothing is copied, nothing is queued."""

    def record(self, device: torch.device) -> None:
        """Return None: work on a CPU is done when it is called."""
        del device

    def stream(self, device: torch.device, after: None) -> AbstractContextManager[None]:
        """Return an empty context."""
        del device, after
        return nullcontext()

    aside = stream

    def order_after(self, device: torch.device, mark: None) -> None:
        """Do nothing: work on a CPU is done when it is called."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Do nothing: who reads `tensor` [N] holds it."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of any shape, is on the CPU."""
        return str(tensor.device.type) == "cpu"

    def new_host(self, like: torch.Tensor) -> torch.Tensor:
        """Return `like` [N] itself."""
        return like

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Return `tensor` [N] itself."""
        return tensor, lambda: None

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Do nothing: `host` [N] is `tensor` [N]."""


class AcceleratorMemory:
    """The memory of any accelerator that torch knows, through pinned host memory."""

    def record(self, device: torch.device) -> torch.Event:
        """Record an event on the current stream of the calling thread."""
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        return event

    @contextmanager
    def stream(self, device: torch.device, after: torch.Event) -> Iterator[None]:
        """Make a new stream current that waits for `after`; synchronize it at the end."""
        own = torch.Stream(device)
        own.wait_event(after)
        with own:
            yield
        own.synchronize()

    @contextmanager
    def aside(self, device: torch.device, after: torch.Event) -> Iterator[None]:
        """Make a new stream current that waits for `after`."""
        own = torch.Stream(device)
        own.wait_event(after)
        with own:
            yield

    def order_after(self, device: torch.device, mark: torch.Event) -> None:
        """Let the current stream wait for an event."""
        torch.accelerator.current_stream(device).wait_event(mark)

    def keep(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses `tensor` [N]."""
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of any shape, is on an accelerator."""
        return str(tensor.device.type) != "cpu"

    def new_host(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory of the shape of `like` [N]."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Queue a copy of `tensor` [N] to pinned memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host, self.record(tensor.device).synchronize

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Queue a copy of pinned `host` [N] to `tensor` [N]."""
        tensor.copy_(host, non_blocking=True)
