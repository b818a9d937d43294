"""Host memory beside a device: pinned, so that copies run at the link's speed and need no processor.

torch keeps freed pinned memory for the next who asks, so a step allocates none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isthmus.train.messages.device import synchronize


def host_room(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return uninitialised host memory of the shape of `like` (and its type, without `dtype`), contiguous.

    It is pinned where `like` is on a device.
    """
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.is_cuda)


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies in host memory, complete when this returns; all are waited for at once."""
    copies = [host_room(one) for one in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    for device in {one.device for one in tensors}:
        synchronize(device)
    return copies
