"""`DeviceTimeline`: when a device executed what the host has queued, without a wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from isthmus.core.process.steady_clock import steady_time_s


class DeviceTimeline(Protocol):
    """Marks behind the work that a thread has queued on a device, and the reading of its results.

    A CPU executes work as it is called, so that its marks are readings of a clock.
    """

    def record(self) -> Any:
        """Return a mark behind the work that the calling thread has queued."""
        ...

    def elapsed_s(self, start: Any, end: Any) -> float | None:
        """Return the seconds between two marks; None while the device has not come to `end`."""
        ...

    def read(self, values: torch.Tensor) -> list[float]:
        """Return `values` [n]; waits until the device has computed them."""
        ...


class HostTimeline:
    """The timeline of a CPU."""

    def __init__(self, clock: Callable[[], float] = steady_time_s) -> None:
        self._clock = clock

    def record(self) -> float:
        """Return the time."""
        return self._clock()

    def elapsed_s(self, start_s: float, end_s: float) -> float:
        """Return the difference."""
        return end_s - start_s

    def read(self, values: torch.Tensor) -> list[float]:
        """Return `values` [n]."""
        return [float(one) for one in values.tolist()]


class CudaTimeline:
    """The timeline of the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self) -> torch.cuda.Event:
        """Record an event that keeps the time."""
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Return the seconds between two events."""
        return start.elapsed_time(end) / 1e3 if end.query() else None

    def read(self, values: torch.Tensor) -> list[float]:
        """Copy `values` [n] to the host; it is the wait of a step."""
        return [float(one) for one in values.tolist()]


def timeline_of(device: torch.device, clock: Callable[[], float] = steady_time_s) -> DeviceTimeline:
    """Return the timeline of `device`; `clock` is that of the host."""
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline(clock)
