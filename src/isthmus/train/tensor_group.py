"""`TensorGroup`: sums among the ranks that share a stage, and the two autograd functions made of them.

torch's own tensor parallelism (DTensor) makes its groups by splitting the default one, which our backend has
no way to, and holds parameters that neither optimizer nor checkpoints here know; so each collective is asked
of a process group directly. All ranks of a stage run the same operations in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.work import gloo_reason
from isthmus.core.errors import PeerError


class TensorGroup:
    """Rank `index` of the `size` that share a stage; `waited_s` counts the seconds spent in reductions.

    Made before the ranks have met, and usable after `join`.
    """

    def __init__(self, index: int = 0, size: int = 1, clock: Callable[[], float] = time.time) -> None:
        self.index, self.size, self._clock = index, size, clock
        self.waited_s = 0.0
        self._group: dist.ProcessGroup | None = None
        self._on_host = True

    def join(self, group: dist.ProcessGroup, *, on_host: bool = True) -> None:
        """Use `group`, whose ranks are those of the stage; `on_host` where it carries host memory only."""
        self._group, self._on_host = group, on_host

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of the `tensor` of all ranks, the same bits on each."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the largest of each element over all ranks."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the `tensor` of the first."""
        if self.size == 1:
            return
        carried = self._carried(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._named():
            self._ready().broadcast([carried], options).wait()
        if carried is not tensor and self.index > 0:
            tensor.copy_(carried)

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.size == 1:
            return tensor
        result = self._carried(tensor)
        result = result.clone(memory_format=torch.contiguous_format) if result is tensor else result
        options = dist.AllreduceOptions()
        options.reduceOp = op
        start_s = self._clock()
        with self._named():
            self._ready().allreduce([result], options).wait()
        self.waited_s += self._clock() - start_s
        return result.to(tensor.device)

    def _carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` where the group can carry it, contiguous."""
        return (tensor.cpu() if self._on_host else tensor).contiguous()

    def _ready(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the ranks of the stage have not met yet")
        return self._group

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say what an error of the group means."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"a rank that shares this stage is lost: {gloo_reason(error) or error}",
                hint="its log says why; the job restarts by itself",
            ) from error


def copied(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return `x`, which all ranks have and each uses for its share; backward sums their gradients."""
    result: torch.Tensor = x if group.size == 1 else _Copied.apply(x, group)
    return result


def summed(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the sum of all ranks' `x`; backward hands its gradient on to each."""
    result: torch.Tensor = x if group.size == 1 else _Summed.apply(x, group)
    return result


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum(gradients[0]), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.sum(x)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
