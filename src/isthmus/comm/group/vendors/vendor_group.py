"""`VendorGroup`: collectives and messages of one vendor's library among the ranks of a cluster, on flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.reduce_operation import ReduceOperation
from isthmus.comm.group.vendors.vendor import Vendor


class VendorGroup:
    """Rank `rank` of `size` in a group of the library; tensors are on the vendor's devices and contiguous.

    All ranks call the same methods in the same order. A work's `wait` raises `RuntimeError` if a peer is lost.
    `channels` are two more backends of the same ranks, which carry messages to higher and to lower ranks: libraries
    execute the messages of two ranks in the order of the calls, so each direction has its own.
    """

    def __init__(
        self, vendor: Vendor, backend: Any, rank: int, size: int, channels: tuple[Any, Any] | None = None
    ) -> None:
        self.vendor, self.backend, self.rank, self.size = vendor, backend, rank, size
        self._channels = channels

    @property
    def has_channels(self) -> bool:
        """Whether `send` and `receive` are available."""
        return self._channels is not None

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Send `tensor` [N] to rank `to`, which receives what this rank sends it in the order of the calls."""
        return self._channel(upwards=to > self.rank).send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Receive the next message of rank `source` into `tensor` [N]."""
        return self._channel(upwards=source < self.rank).recv([tensor], source, 0)

    def _channel(self, *, upwards: bool) -> Any:
        if self._channels is None:
            raise RuntimeError(f"this group of {self.vendor.name} was made without channels")
        return self._channels[0 if upwards else 1]

    def reduces(self, operation: ReduceOperation, dtype: torch.dtype) -> bool:
        """Return whether the library has `operation` for `dtype`."""
        return operation.name in self.vendor.operations and dtype in self.vendor.dtypes

    def all_reduce(self, tensor: torch.Tensor, operation: ReduceOperation) -> dist.Work:
        """Reduce `tensor` [N] in place over all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation.vendors_op
        return self.backend.allreduce([tensor], options)

    def reduce(self, tensor: torch.Tensor, root: int, operation: ReduceOperation) -> dist.Work:
        """Reduce `tensor` [N] over all ranks into that of `root`; those of the others are undefined afterwards."""
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank, options.rootTensor = operation.vendors_op, root, 0
        return self.backend.reduce([tensor], options)

    def reduce_scatter(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], operation: ReduceOperation
    ) -> dist.Work:
        """Reduce `parts[r]` [N] over all ranks into the `output` [N] of rank `r`."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = operation.vendors_op
        return self.backend.reduce_scatter([output], [list(parts)], options)

    def reduce_scatter_flat(self, output: torch.Tensor, tensor: torch.Tensor, operation: ReduceOperation) -> dist.Work:
        """Reduce the blocks of `tensor` [ranks * N] over all ranks, each into the `output` [N] of its rank."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = operation.vendors_op
        return self.backend._reduce_scatter_base(output, tensor, options)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> dist.Work:
        """Fill `outputs[r]` [N] with the `tensor` [N] of rank `r`."""
        return self.backend.allgather([list(outputs)], [tensor])

    def all_gather_flat(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        """Fill `output` [ranks * N] with the tensors [N] of all ranks, one after the other."""
        return self.backend._allgather_base(output, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Copy the `tensor` [N] of `root` to every rank."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self.backend.broadcast([tensor], options)

    def abort(self) -> None:
        """Make operations that wait fail."""
        for one in (self.backend, *(self._channels or ())):
            self.vendor.abort(one, self.rank, self.size)
