"""`TensorParallelGroup`: collectives among the tensor-parallel ranks of a stage, and their autograd functions.

torch's DTensor splits the default process group, which the Isthmus backend does not support, and its
parameters do not fit this optimizer and these checkpoints; so this module calls collectives of a process
group directly. All ranks of a stage run the same collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from isthmus.core.process.steady_clock import steady_time_s
from isthmus.train.communication.pinned_memory import copy_tensors_to_host, empty_host_tensor
from isthmus.train.communication.stage_group import StageGroup
from isthmus.train.liveness.peer_wait import waiting_for_peer

Collective: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A collective among the ranks of a stage."""


class TensorParallelGroup(StageGroup):
    """Rank `tp_rank` of `size` tensor-parallel ranks of a stage; usable after `join`.

    With `sequence_parallel` (sequence parallelism) each rank has an equal part of the tokens between blocks, in
    rank order; otherwise each has all tokens. `waited_s` is the total time spent in collectives, broadcasts
    excluded.
    """

    def __init__(
        self,
        tp_rank: int = 0,
        size: int = 1,
        *,
        sequence_parallel: bool = False,
        clock: Callable[[], float] = steady_time_s,
    ) -> None:
        super().__init__("tensor-parallel", size, clock)
        self.tp_rank, self.sequence_parallel = tp_rank, sequence_parallel

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of `tensor` (of any shape) over all ranks."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def all_gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather the tokens: `x` [B, S / size, H] -> [B, S, H]."""
        (mine,) = self._to_group_memory([x])
        parts = [self._new_buffer(x) for _ in range(self.size)]
        with self._timed():
            self._joined_group().allgather([parts], [mine]).wait()
        return torch.cat([_to_device_of(part, x) for part in parts], 1)

    def reduce_scatter_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter the tokens: `x` [B, S, H] -> [B, S / size, H]."""
        chunks = x.chunk(self.size, 1)
        parts, mine = self._to_group_memory(chunks), self._new_buffer(chunks[0])
        with self._timed():
            self._joined_group().reduce_scatter([mine], [parts]).wait()
        return _to_device_of(mine, x)

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's tokens: `x` [B, S, H] -> [B, S / size, H]."""
        return x.chunk(self.size, 1)[self.tp_rank].contiguous()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` (of any shape, equal on all ranks) with that of the first rank."""
        if self.size == 1:
            return
        (carried,) = self._to_group_memory([tensor])
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._waiting():
            self._joined_group().broadcast([carried], options).wait()
        if carried is not tensor and self.tp_rank > 0:
            tensor.copy_(carried, non_blocking=True)

    def _to_group_memory(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `tensors` contiguous in memory that the group supports: on the device, or pinned copies."""
        if self._on_host and any(one.is_cuda for one in tensors):
            return copy_tensors_to_host(tensors)
        return [one.contiguous() for one in tensors]

    def _new_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised buffer like `like` in memory that the group supports."""
        return empty_host_tensor(like) if self._on_host else like.new_empty(like.shape)


def _to_device_of(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `result` on the device of `x`, copied asynchronously to the host."""
    return result.to(x.device, non_blocking=True)


def enter_parallel_region(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Return all tokens [B, S, H] of `x` as the input of a sharded block; backward sums over the ranks.

    `x` is [B, S / tp, H] with sequence parallelism, else [B, S, H].
    """
    return (
        _apply_collective(x, group, group.all_gather_tokens, group.reduce_scatter_tokens)
        if group.sequence_parallel
        else copy_to_parallel_region(x, group)
    )


def exit_parallel_region(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Sum the partial results `x` [B, S, H] of a sharded block; with sequence parallelism [B, S / tp, H]."""
    if group.sequence_parallel:
        return _apply_collective(x, group, group.reduce_scatter_tokens, group.all_gather_tokens)
    return _apply_collective(x, group, group.all_reduce_sum, _identity)


def split_sequence(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Return this rank's tokens of the replicated `x` [B, S, H]; `x` itself without sequence parallelism."""
    return _apply_collective(x, group, group.own_tokens, group.all_gather_tokens) if group.sequence_parallel else x


def gather_sequence(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Return all tokens [B, S, H] on each rank; their gradients must be equal on all ranks."""
    return _apply_collective(x, group, group.all_gather_tokens, group.own_tokens) if group.sequence_parallel else x


def copy_to_parallel_region(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Return the replicated `x` (of any shape) as the input of a sharded computation; backward sums over the ranks."""
    return _apply_collective(x, group, _identity, group.all_reduce_sum)


def _apply_collective(
    x: torch.Tensor, group: TensorParallelGroup, forward_op: Collective, backward_op: Collective
) -> torch.Tensor:
    """Return `forward_op(x)`; its backward applies `backward_op` to the gradient."""
    result: torch.Tensor = x if group.size == 1 else _CollectiveFunction.apply(x, forward_op, backward_op)
    return result


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


class _CollectiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_op: Collective, backward_op: Collective) -> torch.Tensor:
        ctx.back, ctx.thread = backward_op, threading.get_ident()
        return forward_op(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with waiting_for_peer(ctx.thread):  # on a device autograd may run in a thread of its own
            return ctx.back(gradients[0]), None, None
