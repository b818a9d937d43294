"""`AllReduceMethod`: another way to all-reduce, which a group uses for the tensors that it takes."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from isthmus.comm.group.reduce_operation import ReduceOperation


class AllReduceMethod(Protocol):
    """What `IsthmusGroup.use_method` takes; every rank of the group uses an equal one."""

    def takes(self, tensor: torch.Tensor, operation: ReduceOperation) -> bool:
        """Return whether it sums `tensor`, of any shape, by `operation`: of dtype and operation only."""
        ...

    def all_reduce(self, tensor: torch.Tensor, operation: ReduceOperation, timeout_s: float | None) -> dist.Work:
        """Reduce `tensor`, of any shape, in place; every rank gets the same bits. Without `timeout_s`, the group's."""
        ...

    def close(self, *, wait: bool) -> None:
        """Stop its threads: after all queued sums if `wait`."""
        ...
