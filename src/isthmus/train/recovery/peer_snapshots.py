"""`Copies`: schedules the copies of a rank's snapshots to a peer, at the same steps on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.train.checkpoint.peer_choice import choose_holders
from isthmus.train.checkpoint.peer_copy import PeerCopies
from isthmus.train.checkpoint.saver import Saver
from isthmus.train.messages.exchange import Exchange
from isthmus.train.recovery.recover import Recovery
from isthmus.train.recovery.restore_from_memory import inherit


class Copies:
    """Copies one rank's snapshots to a peer; only with Isthmus transport.

    `delayed`, equal on all ranks, is true while any rank is still sending a copy. No rank takes a snapshot
    then: memory holds two steps, and the older one must stay until all ranks have copies of the newer. On a
    slow network the interval between snapshots is therefore the duration of a copy.
    """

    def __init__(
        self, spec: WorkerSpec, folder: WorkerFolder, recovery: Recovery, exchange: Exchange
    ) -> None:
        self._spec, self._folder, self._recovery, self._exchange = spec, folder, recovery, exchange
        self._peers: PeerCopies | None = None
        self.delayed = False

    def meet(self, saver: Saver) -> None:
        """Start copying in a new process group; at first, restore what the previous attempt left."""
        group, self.delayed = dist.group.WORLD, False
        transport = group.transport if isinstance(group, IsthmusGroup) else None
        memory = self._recovery.memory
        if self._spec.attempt > 1 and not self._recovery.met_before:
            inherit(self._spec, memory, self._exchange, transport, saver.newest_step())
        ranks = self._folder.read_ranks()
        if transport is not None and ranks is not None:
            workers = sorted(ranks.workers, key=lambda one: one.rank)
            holders = choose_holders(
                [(one.cluster, one.host) for one in workers],
                across_clusters=self._spec.job.checkpoints.copies_across_clusters,
            )
            if self._peers is not None:
                self._peers.close()
            self._peers = PeerCopies(transport, memory, holders)
            self._peers.start()

    def send(self, step: int) -> None:
        """Start sending the snapshot of the state after `step` steps."""
        if self._peers is not None:
            self._peers.send(step)

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [n] (float64) over all ranks; sets `delayed` on all of them."""
        busy = self._peers is not None and self._peers.busy
        total = self._exchange.sum_over_all(torch.cat([values, values.new_tensor([float(busy)])]))
        self.delayed = bool(total[-1] > 0)
        return total[:-1]
