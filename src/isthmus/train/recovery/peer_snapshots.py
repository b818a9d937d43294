"""`Copies`: when a rank's snapshots go to a peer, so that the ranks have copies of the same steps."""

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
    """One rank's side. `delayed` says, the same at all ranks, that a copy is still on its way somewhere.

    No rank takes another snapshot then: two steps are all that anybody keeps, and the one before must stay
    until all have copies of the next. Where the network is slow, snapshots are as far apart as copies take.
    There are copies under our own transport alone.
    """

    def __init__(
        self, spec: WorkerSpec, folder: WorkerFolder, recovery: Recovery, exchange: Exchange
    ) -> None:
        self._spec, self._folder, self._recovery, self._exchange = spec, folder, recovery, exchange
        self._peers: PeerCopies | None = None
        self.delayed = False

    def meet(self, saver: Saver) -> None:
        """Begin anew with the others; at first, take over what another attempt has left."""
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
        """Begin to send the snapshot after `step` steps."""
        if self._peers is not None:
            self._peers.send(step)

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [n] (float64) over all ranks; it tells if copies are `delayed`."""
        busy = self._peers is not None and self._peers.busy
        total = self._exchange.sum_over_all(torch.cat([values, values.new_tensor([float(busy)])]))
        self.delayed = bool(total[-1] > 0)
        return total[:-1]
