"""`TensorGroup`: sums among the ranks that share a stage, and what autograd makes of them at a block's ends.

torch's own tensor parallelism (DTensor) makes its groups by splitting the default one, which our backend has
no way to, and holds parameters that neither optimizer nor checkpoints here know; so each collective is asked
of a process group directly. All ranks of a stage run the same operations in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from isthmus.comm.group.group_work import gloo_reason
from isthmus.core.errors import PeerError
from isthmus.train.messages.pinned_memory import host_copies, host_room

Carry: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A sum or a gather among the ranks of a stage."""


class TensorGroup:
    """Rank `index` of the `size` that share a stage; `waited_s` are the seconds spent in sums and gathers.

    Made before the ranks have met, and usable after `join`. With `cuts_sequence` each rank has an equal part
    of the tokens between blocks, in the order of ranks; without it all have all.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        *,
        cuts_sequence: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.index, self.size, self.cuts_sequence, self._clock = index, size, cuts_sequence, clock
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

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Return all tokens [B, S, H], given each rank's own `x` [B, S / size, H]."""
        (mine,) = self._carried([x])
        parts = [self._room(x) for _ in range(self.size)]
        with self._timed():
            self._ready().allgather([parts], [mine]).wait()
        return torch.cat([_beside(part, x) for part in parts], 1)

    def sum_of_own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's own tokens [B, S / size, H] of the sum of the `x` [B, S, H] of all ranks."""
        chunks = x.chunk(self.size, 1)
        parts, mine = self._carried(chunks), self._room(chunks[0])
        with self._timed():
            self._ready().reduce_scatter([mine], [parts]).wait()
        return _beside(mine, x)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's own tokens of `x` [B, S, H], a copy."""
        return x.chunk(self.size, 1)[self.index].contiguous()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give every rank the `tensor` of the first."""
        if self.size == 1:
            return
        (carried,) = self._carried([tensor])
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._named():
            self._ready().broadcast([carried], options).wait()
        if carried is not tensor and self.index > 0:
            tensor.copy_(carried, non_blocking=True)

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.size == 1:
            return tensor
        (result,) = self._carried([tensor])
        result = result.clone(memory_format=torch.contiguous_format) if result is tensor else result
        options = dist.AllreduceOptions()
        options.reduceOp = op
        with self._timed():
            self._ready().allreduce([result], options).wait()
        return _beside(result, tensor)

    def _carried(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `tensors` where the group can carry them, contiguous; a device's by way of pinned memory."""
        if self._on_host and any(one.is_cuda for one in tensors):
            return host_copies(tensors)
        return [one.contiguous() for one in tensors]

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        """Return where the group puts a tensor of the shape and type of `like`."""
        return host_room(like) if self._on_host else like.new_empty(like.shape)

    def _ready(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the ranks of the stage have not met yet")
        return self._group

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start_s = self._clock()
        with self._named():
            yield
        self.waited_s += self._clock() - start_s

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


def _beside(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return what the group has made where `x` is; its device waits for the copy, nobody else."""
    return result.to(x.device, non_blocking=True)


def entered(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return all tokens [B, S, H] for a block that each rank computes its share of.

    `x` are the tokens between blocks; backward sums the gradients of all shares.
    """
    return _between(x, group, group.joined, group.sum_of_own) if group.cuts_sequence else copied(x, group)


def left(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the tokens between blocks of the sum of all ranks' `x` [B, S, H], the shares of a block."""
    if group.cuts_sequence:
        return _between(x, group, group.sum_of_own, group.joined)
    return _between(x, group, group.sum, _same)


def begun(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the tokens between blocks of `x` [B, S, H], which all ranks have alike."""
    return _between(x, group, group.own, group.joined) if group.cuts_sequence else x


def ended(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return all tokens [B, S, H] on all ranks, whose gradients are alike; `x` are those between blocks."""
    return _between(x, group, group.joined, group.own) if group.cuts_sequence else x


def copied(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return `x`, which all ranks have and each uses for its share; backward sums their gradients."""
    return _between(x, group, _same, group.sum)


def _between(x: torch.Tensor, group: TensorGroup, there: Carry, back: Carry) -> torch.Tensor:
    """Return `there(x)`, whose gradient goes `back`."""
    result: torch.Tensor = x if group.size == 1 else _Carried.apply(x, there, back)
    return result


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Carry, back: Carry) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None
