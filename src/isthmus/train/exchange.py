"""`Exchange`: messages of a stage to others through torch.distributed, with the waiting accounted for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from isthmus.train.metrics import Account

TIED_TAG = 0
"""The tag of the gradients of a tied embedding; micro-batches use those above."""


def forward_tag(micro_batch: int) -> int:
    """Return the tag of the activations of a micro-batch."""
    return 1 + 2 * micro_batch


def backward_tag(micro_batch: int) -> int:
    """Return the tag of the gradients of the activations of a micro-batch."""
    return 2 + 2 * micro_batch


class Exchange:
    """Messages to and from other ranks of the default process group; `clusters[r]` is where rank `r` runs.

    All exchanges are started at once and completed by `wait`. `account` is that of the present step.
    """

    def __init__(self, clusters: Sequence[str], rank: int) -> None:
        self._far = [cluster != clusters[rank] for cluster in clusters]
        self.account = Account()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send `tensor` (contiguous; it must not change until waited for)."""
        if self._far[peer]:
            self.account.wan_bytes += tensor.numel() * tensor.element_size()
        return dist.isend(tensor, peer, tag=tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive into `tensor`."""
        return dist.irecv(tensor, peer, tag=tag)

    def wait(self, work: dist.Work) -> None:
        """Wait for an exchange; raises `PeerError` where the peer was lost."""
        clock = self.account.clock
        start_s = clock()
        work.wait()
        self.account.waited(start_s, clock(), getattr(work, "under_way", None))

    def sum_with(self, tensor: torch.Tensor, peer: int, *, mine_first: bool) -> torch.Tensor:
        """Return the sum of `tensor` here and at `peer`, added in the same order on both: the same bits."""
        theirs = torch.empty_like(tensor)
        works = self.receive(theirs, peer, TIED_TAG), self.send(tensor, peer, TIED_TAG)
        for work in works:
            self.wait(work)
        return tensor + theirs if mine_first else theirs + tensor

    def sum_over_all(self, value: float) -> float:
        """Return the sum of `value` (float64) over all ranks; the wait for the slowest counts as idle."""
        total = torch.tensor([value], dtype=torch.float64)
        start_s = self.account.clock()
        dist.all_reduce(total)
        self.account.waited(start_s, self.account.clock(), None)
        return float(total.item())
