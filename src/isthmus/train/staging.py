"""Tensors of a device by way of host memory, for process groups that carry nothing else.

Pinned memory is taken from torch's own cache of it, so that a step allocates none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


class HostStaging:
    """Copies in host memory; `pinned` where a device copies from and to it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned

    def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contiguous copy to send; what computes `tensor` has ended when this returns."""
        host = self.room_for(tensor)
        host.copy_(tensor)
        return host

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return uninitialised host memory of the shape and type of `tensor`."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)


class Landing:
    """A receive into host memory, copied to its `target` by the first `wait`; that copy counts as on its way.

    It is the part of `dist.Work` that the runtime uses.
    """

    def __init__(
        self,
        work: dist.Work,
        host: torch.Tensor,
        target: torch.Tensor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._work, self._host, self._target, self._clock = work, host, target, clock
        self._landed = False
        self.under_way: tuple[float, float] | None = None

    def is_completed(self) -> bool:
        """Tell whether `target` holds the message."""
        return self._landed

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until `target` holds the message; raises what the receive raises."""
        if self._landed:
            return True
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        self._target.copy_(self._host)
        self._landed = True
        sent_to_arrived = getattr(self._work, "under_way", None)
        if sent_to_arrived is not None:
            self.under_way = sent_to_arrived[0], self._clock()
        return True
