"""`copy_to_host`: fill host memory with tensors that lie there or on a device, off the training thread.

A device's tensors come on a stream of their own, which waits for what was asked of the device before, through
a piece of pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch

BOUNCE_BYTES = 64 * 2**20
"""Pinned memory through which a device's tensors come."""

Ready: TypeAlias = "torch.cuda.Event | None"
"""What a copy has to wait for: an event of the device, None for tensors in host memory."""


def copy_ready(tensors: Iterable[torch.Tensor]) -> Ready:
    """Return what a copy of `tensors` has to wait for; called by the thread that computes them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    event: Ready = torch.cuda.current_stream().record_event()
    return event


def copy_to_host(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], ready: Ready) -> None:
    """Copy each (source, contiguous target in host memory of its shape and type), and wait for all."""
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
    """Copy a device's tensor in pieces of the pinned `bounce`, [bytes] uint8; asleep while it copies."""
    there = torch.cuda.Event(blocking=True)
    pieces = source.contiguous().view(-1).view(torch.uint8).split(bounce.numel())
    for piece, place in zip(pieces, target.view(-1).view(torch.uint8).split(bounce.numel()), strict=True):
        pinned = bounce[: piece.numel()]
        pinned.copy_(piece, non_blocking=True)
        there.record()
        there.synchronize()
        place.copy_(pinned)
