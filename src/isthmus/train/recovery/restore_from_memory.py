"""`restore_from_memory`: restores the snapshots that the previous attempt left in shared memory.

A machine may still hold snapshots of its own ranks and copies of those of others. The newest step with a
snapshot of every rank is selected; a rank that moved to another machine receives its copy from the holder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_lease import compatibility_digest, orphaned_runs, remove_orphan
from isthmus.train.checkpoint.memory_slot import MemorySlot
from isthmus.train.checkpoint.snapshot_replicator import receive_slot, send_slot
from isthmus.train.communication.communicator import Communicator

SnapshotSteps = Mapping[int, Sequence[int]]
"""Steps of the snapshots on one machine, by rank."""


def choose_senders(
    steps_on: Sequence[SnapshotSteps], after_step: int, *, can_transfer: bool
) -> tuple[int, list[int]] | None:
    """Return the newest step with a snapshot of every rank, and the rank that holds each rank's snapshot.

    `steps_on[r]` has the snapshots on the machine of rank `r`. Returns None if there is no such step above
    `after_step`. If not `can_transfer`, every rank must hold its own snapshot. Own snapshots are preferred.
    """
    num_ranks = len(steps_on)
    holders: list[dict[int, int]] = []  # by rank: step to holder
    for rank in range(num_ranks):
        order = [rank, *(other for other in range(num_ranks) if other != rank)] if can_transfer else [rank]
        holders.append({step: holder for holder in reversed(order) for step in steps_on[holder].get(rank, ())})
    common = set.intersection(*map(set, holders))
    step = max((one for one in common if one > after_step), default=None)
    return None if step is None else (step, [by_step[step] for by_step in holders])


def restore_from_memory(
    spec: WorkerSpec,
    memory: MemoryCheckpoint,
    communicator: Communicator,
    transport: Transport | None,
    after_step: int,
) -> None:
    """Restore to each rank's `memory` the newest step above `after_step` with a snapshot of every rank.

    All ranks call this. It removes the previous attempt's snapshots from this machine. A rank without room
    for its snapshot skips it; `RankRecovery.restore_common_state` then finds no common step.
    """
    # Step 1: collect the snapshots of all machines.
    runs = list(orphaned_runs(compatibility_digest(spec), memory.root))
    slots = _find_slots(runs, len(spec.plan.ranks), memory.root)
    local = {rank: sorted(by_step) for rank, by_step in slots.items()}
    steps_on = [_parse_steps(one) for one in communicator.all_gather_bytes(json.dumps(local).encode())]
    # Step 2: copy or send the snapshots of the newest common step.
    found = choose_senders(steps_on, after_step, can_transfer=transport is not None)
    if found is not None:
        step, holders = found
        for rank, holder in enumerate(holders):
            if rank == holder == spec.rank:
                _adopt_slot(slots[rank][step], memory)
            elif transport is not None and holder == spec.rank:
                send_slot(transport, rank, slots[rank][step], returning=True)
            elif transport is not None and rank == spec.rank:
                receive_slot(transport, holder, memory, returning=True)
        print(f"rank {spec.rank}: the last attempt left the state after step {step} in memory", flush=True)
    # Step 3: remove the previous attempt's memory, once every rank is done.
    communicator.barrier()
    for run in runs:
        remove_orphan(run, memory.root)


def _find_slots(runs: Sequence[str], num_ranks: int, folder: Path) -> dict[int, dict[int, MemorySlot]]:
    """Return the valid snapshots of the leases `runs`, by rank and step."""
    found: dict[int, dict[int, MemorySlot]] = {}
    for run in runs:
        for rank in range(num_ranks):
            one = MemoryCheckpoint(run, rank, folder)
            for step in one.steps():
                slot = one.slot(step)
                if slot is not None:
                    found.setdefault(rank, {})[step] = slot
    return found


def _parse_steps(data: bytes) -> dict[int, list[int]]:
    """Return the snapshot steps of a JSON message, by rank."""
    return {int(rank): steps for rank, steps in json.loads(data).items()}


def _adopt_slot(source: MemorySlot, memory: MemoryCheckpoint) -> None:
    """Copy the snapshot of `source` over the older one of `memory`, if there is room."""
    found = source.read_raw()
    if found is None:
        return
    label, data = found
    slot = memory.reserve_slot()
    try:
        buffer = slot.open_for_write(data.numel())
    except UnavailableError as error:
        print(f"warning: the snapshot of the last attempt is not restored: {error}", flush=True)
        return
    buffer[: data.numel()].copy_(data)
    memory.commit_slot(slot, slot.seal_raw(label))
