"""`TorchSums`: batches of gradients over groups of torch itself, such as NCCL's, by their own collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from isthmus.train.communication.torch_device import HOST_BACKENDS
from isthmus.train.communication.torch_process_group import GROUP_TIMEOUT
from isthmus.train.update.bucket_batches import BucketBatch, Exchange


class TorchSums:
    """The batches of rank `rank`, with a group for each set of owners; all ranks make one at the same time."""

    def __init__(self, batches: Sequence[BucketBatch], rank: int) -> None:
        self._batches, self._rank = batches, rank
        near = [local for one in batches for local in one.buckets[0].owners if len(local) > 1]
        sets = dict.fromkeys([*(one.owners for one in batches), *map(tuple, near)])
        self._groups = {ranks: dist.new_group(list(ranks), timeout=GROUP_TIMEOUT) for ranks in sets}
        self._on_host = bool(batches) and dist.get_backend() in HOST_BACKENDS

    def run(self, exchange: Exchange, number: int, sent: torch.Tensor | None, got: torch.Tensor | None) -> None:
        """Exchange batch `number`: the values `sent` [num_elements], if any; `got` [num_elements] takes the result."""
        batch, like = self._batches[number], sent if sent is not None else got
        if like is None:
            like = torch.empty(0)
        values = torch.zeros(batch.num_elements, dtype=like.dtype, device=like.device) if sent is None else sent
        values = values.cpu() if self._on_host else values
        if exchange is Exchange.BROADCAST:
            self._broadcast(batch, values)
        else:
            dist.all_reduce(values, group=self._groups[batch.owners])
        if got is not None:
            got.copy_(values)

    def _broadcast(self, batch: BucketBatch, values: torch.Tensor) -> None:
        """Copy each bucket of flat `values` [num_elements] from its leader to the owners in its cluster."""
        local = next(one for one in batch.buckets[0].owners if self._rank in one)
        if len(local) > 1:
            parts = values.split([one.num_elements for one in batch.buckets])
            for bucket, part in zip(batch.buckets, parts, strict=True):
                leader = next(one for one in bucket.leaders if one in local)
                dist.broadcast(part, leader, group=self._groups[tuple(local)])
