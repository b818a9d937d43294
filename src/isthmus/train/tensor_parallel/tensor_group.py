"""`TensorGroup`: collectives among the tensor-parallel ranks of a stage, and their autograd functions.

torch's DTensor splits the default process group, which the Isthmus backend does not support, and its
parameters do not fit this optimizer and these checkpoints; so this module calls collectives of a process
group directly. All ranks of a stage run the same collectives in the same order.
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
"""A collective among the ranks of a stage."""


class TensorGroup:
    """Rank `index` of `size` tensor-parallel ranks of a stage; usable after `join`.

    With `cuts_sequence` (sequence parallelism) each rank has an equal part of the tokens between blocks, in
    rank order; otherwise each has all tokens. `waited_s` is the total time spent in collectives, broadcasts
    excluded.
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
        """Use `group`, which has the ranks of the stage; `on_host` if it supports host memory only."""
        self._group, self._on_host = group, on_host

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks, bit-identical on each."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of `tensor` over all ranks."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather the tokens: `x` [B, S / size, H] -> [B, S, H]."""
        (mine,) = self._carried([x])
        parts = [self._room(x) for _ in range(self.size)]
        with self._timed():
            self._ready().allgather([parts], [mine]).wait()
        return torch.cat([_beside(part, x) for part in parts], 1)

    def sum_of_own(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter the tokens: `x` [B, S, H] -> [B, S / size, H]."""
        chunks = x.chunk(self.size, 1)
        parts, mine = self._carried(chunks), self._room(chunks[0])
        with self._timed():
            self._ready().reduce_scatter([mine], [parts]).wait()
        return _beside(mine, x)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's tokens: `x` [B, S, H] -> [B, S / size, H]."""
        return x.chunk(self.size, 1)[self.index].contiguous()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with that of the first rank."""
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
        """Return `tensors` contiguous in memory that the group supports: on the device, or pinned copies."""
        if self._on_host and any(one.is_cuda for one in tensors):
            return host_copies(tensors)
        return [one.contiguous() for one in tensors]

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised buffer like `like` in memory that the group supports."""
        return host_room(like) if self._on_host else like.new_empty(like.shape)

    def _ready(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("the tensor-parallel group is used before `join`")
        return self._group

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start_s = self._clock()
        with self._named():
            yield
        self.waited_s += self._clock() - start_s

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Raise `PeerError` for an error of the process group."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"lost a tensor-parallel rank of this stage: {gloo_reason(error) or error}",
                hint="see its log for the cause; the job restarts automatically",
            ) from error


def _beside(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `result` on the device of `x`, copied asynchronously to the host."""
    return result.to(x.device, non_blocking=True)


def entered(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return all tokens [B, S, H] of `x` as the input of a sharded block; backward sums over the ranks.

    `x` is [B, S / tp, H] with sequence parallelism, else [B, S, H].
    """
    return _between(x, group, group.joined, group.sum_of_own) if group.cuts_sequence else copied(x, group)


def left(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Sum the partial results `x` [B, S, H] of a sharded block; with sequence parallelism [B, S / tp, H]."""
    if group.cuts_sequence:
        return _between(x, group, group.sum_of_own, group.joined)
    return _between(x, group, group.sum, _same)


def begun(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return this rank's tokens of the replicated `x` [B, S, H]; `x` itself without sequence parallelism."""
    return _between(x, group, group.own, group.joined) if group.cuts_sequence else x


def ended(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return all tokens [B, S, H] on each rank; their gradients must be equal on all ranks."""
    return _between(x, group, group.joined, group.own) if group.cuts_sequence else x


def copied(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the replicated `x` as the input of a sharded computation; backward sums over the ranks."""
    return _between(x, group, _same, group.sum)


def _between(x: torch.Tensor, group: TensorGroup, there: Carry, back: Carry) -> torch.Tensor:
    """Return `there(x)`; its backward applies `back` to the gradient."""
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
