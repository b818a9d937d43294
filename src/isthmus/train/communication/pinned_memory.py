"""Pinned host memory, for copies at full link speed without the CPU.

torch caches freed pinned memory, so that steps after the first allocate none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isthmus.train.communication.torch_device import synchronize


def empty_host_tensor(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised contiguous host tensor of the shape of `like`, pinned if that is on a device.

    `dtype` defaults to that of `like`.
    """
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.is_cuda)


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor, of any shape, on `device`: itself on a CPU, else a copy that the device makes in order."""
    if device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)


def copy_tensors_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return complete contiguous copies of `tensors`, each in its shape, in host memory."""
    copies = [empty_host_tensor(one) for one in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    for device in {one.device for one in tensors}:
        synchronize(device)
    return copies
