"""`copy_to_host`: copy tensors to host memory on a background thread.

Device tensors are copied on a separate stream, which first waits for prior work on the device, through a
pinned bounce buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

BOUNCE_BYTES = 64 * 2**20
"""Size of the pinned bounce buffer."""

ReadyEvent: TypeAlias = "torch.cuda.Event | None"
"""Device event that a copy must wait for; None for tensors in host memory."""


def record_ready_event(tensors: Iterable[torch.Tensor]) -> ReadyEvent:
    """Record the event that a copy of `tensors` (any shape) must wait for; call it on the thread that computes them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event: ReadyEvent = torch.cuda.current_stream().record_event()
    return event


def copy_to_host(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], ready: ReadyEvent) -> None:
    """Copy each (source, contiguous host target of equal shape and dtype); wait for all."""
    with torch.no_grad():
        if ready is None:
            for source, target in pairs:
                target.copy_(source)
            return
        bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(ready)
            for source, target in pairs:
                if source.is_cuda:
                    _copy_through(bounce, source, target)
                else:
                    target.copy_(source)


def _copy_through(bounce: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a device tensor in chunks through the pinned `bounce`, uint8 [bytes]; sleep during transfers."""
    arrived = torch.cuda.Event(blocking=True)
    pieces = source.contiguous().view(-1).view(torch.uint8).split(bounce.numel())
    for piece, place in zip(pieces, target.view(-1).view(torch.uint8).split(bounce.numel()), strict=True):
        pinned = bounce[: piece.numel()]
        pinned.copy_(piece, non_blocking=True)
        arrived.record()
        arrived.synchronize()
        place.copy_(pinned)
