"""`HostTensors`: flat CPU memory for tensors of any layout and device, copied on the caller's stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostTensors:
    """Flat contiguous CPU tensors for `tensors`, with their values if `read`; `store` copies them back.

    With `on_device`, they stay where they are, for a library that takes them there.

    A contiguous CPU tensor is used in place. For tensors of an accelerator, the copy to pinned host memory is queued
    on the caller's current stream, behind the work that computes them; `store` copies on a stream of its own, behind
    that copy, so the work that the caller had queued before has read the old values.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, read: bool, on_device: bool = False) -> None:
        self._tensors = [one.detach() for one in tensors]
        self._device = next((one.device for one in self._tensors if one.device.type != "cpu"), None)
        self._copied: torch.Event | None = None
        if on_device:
            self.flat = [_flat_in_place(one, read=read) for one in self._tensors]
            return
        self.flat = [_flat_copy(one, read=read) for one in self._tensors]
        if self._device is not None:
            self._copied = torch.Event(self._device)
            self._copied.record(torch.accelerator.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait until `flat` has the values of the tensors."""
        if self._copied is not None:
            self._copied.synchronize()

    def store(self) -> None:
        """Copy `flat` to the tensors, and wait until that is done."""
        pairs = [
            (one, flat)
            for one, flat in zip(self._tensors, self.flat, strict=True)
            if one.data_ptr() != flat.data_ptr() and one.numel()
        ]
        if self._device is None or self._copied is None:
            for one, flat in pairs:
                one.copy_(flat.view(one.shape))
            return
        stream = torch.Stream(self._device)
        stream.wait_event(self._copied)
        with stream:
            for one, flat in pairs:
                one.copy_(flat.view(one.shape), non_blocking=True)
        stream.synchronize()


def _flat_in_place(tensor: torch.Tensor, *, read: bool) -> torch.Tensor:
    return tensor.contiguous().view(-1) if read or tensor.is_contiguous() else tensor.new_empty(tensor.numel())


def _flat_copy(tensor: torch.Tensor, *, read: bool) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return _flat_in_place(tensor, read=read)
    host = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
    if read:
        host.view(tensor.shape).copy_(tensor, non_blocking=True)
    return host
