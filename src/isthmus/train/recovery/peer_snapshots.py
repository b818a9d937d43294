"""`PeerSnapshots`: schedules the copies of a rank's snapshots to a peer, at the same steps on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec
from isthmus.train.checkpoint.checkpoint_manager import CheckpointManager
from isthmus.train.checkpoint.snapshot_holders import choose_snapshot_holders
from isthmus.train.checkpoint.snapshot_replicator import SnapshotReplicator
from isthmus.train.communication.communicator import Communicator
from isthmus.train.recovery.rank_recovery import RankRecovery
from isthmus.train.recovery.restore_from_memory import restore_from_memory
from isthmus.train.recovery.snapshot_interval import SnapshotInterval


class PeerSnapshots:
    """Copies one rank's snapshots to a peer; only with Isthmus transport.

    `is_delayed`, equal on all ranks, is true while any rank is still sending a copy. No rank takes a snapshot
    then: memory holds two steps, and the older one must stay until all ranks have copies of the newer. On a
    slow network the interval between snapshots is therefore the duration of a copy. `interval` says at which steps
    snapshots are due; `waited_s` is how long training has waited for the last one.
    """

    def __init__(
        self, spec: WorkerSpec, folder: WorkerFolder, recovery: RankRecovery, communicator: Communicator
    ) -> None:
        self._spec, self._folder, self._recovery, self._communicator = spec, folder, recovery, communicator
        self._replicator: SnapshotReplicator | None = None
        self.is_delayed = False
        self.interval = SnapshotInterval(spec.job.checkpoints.memory_interval)
        self.waited_s = self._last_step_s = 0.0

    def connect(self, checkpoint_manager: CheckpointManager) -> None:
        """Start copying in a new process group; at first, restore what the previous attempt left."""
        group, self.is_delayed = dist.group.WORLD, False
        self.interval.restart()
        self.waited_s = self._last_step_s = 0.0
        transport = group.transport if isinstance(group, IsthmusGroup) else None
        memory = self._recovery.memory
        if self._spec.attempt > 1 and not self._recovery.has_rejoined:
            restore_from_memory(self._spec, memory, self._communicator, transport, checkpoint_manager.newest_step())
        ranks = self._folder.read_rank_map()
        if transport is not None and ranks is not None:
            workers = sorted(ranks.workers, key=lambda one: one.rank)
            holders = choose_snapshot_holders(
                [(one.cluster, one.host) for one in workers],
                across_clusters=self._spec.job.checkpoints.copies_across_clusters,
            )
            if self._replicator is not None:
                self._replicator.close()
            self._replicator = SnapshotReplicator(transport, memory, holders)
            self._replicator.start()

    def send(self, step: int) -> None:
        """Start sending the snapshot of the state after `step` steps."""
        if self._replicator is not None:
            self._replicator.send(step)

    def end_step(self, step_s: float) -> None:
        """Record the duration of a step, which the next sum tells all ranks."""
        self._last_step_s = step_s

    def sum_over_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [n] (float64) over all ranks; sets `is_delayed` on all of them."""
        busy = self._replicator is not None and self._replicator.is_sending
        own = values.new_tensor([float(busy), self.waited_s, self._last_step_s])
        total = self._communicator.sum_over_all(torch.cat([values, own]))
        self.is_delayed, self.waited_s = bool(total[-3] > 0), 0.0
        if total[-1] > 0:
            self.interval.add_step(float(total[-2]), float(total[-1]))
        return total[:-3]
