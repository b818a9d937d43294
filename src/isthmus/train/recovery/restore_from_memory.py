"""`inherit`: restores the snapshots that the previous attempt left in shared memory.

A machine may still hold snapshots of its own ranks and copies of those of others. The newest step with a
snapshot of every rank is selected; a rank that moved to another machine receives its copy from the holder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from isthmus.comm.transport.transport import Transport
from isthmus.core.errors import UnavailableError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.memory_lease import left_behind, remove_left_behind, told_of
from isthmus.train.checkpoint.memory_slot import MemorySlot
from isthmus.train.checkpoint.peer_copy import receive_slot, send_slot
from isthmus.train.messages.exchange import Exchange

Places = Mapping[int, Sequence[int]]
"""Steps of the snapshots on one machine, by rank."""


def givers_of(told: Sequence[Places], after: int, *, may_send: bool) -> tuple[int, list[int]] | None:
    """Return the newest step with a snapshot of every rank, and the rank that holds each rank's snapshot.

    `told[r]` has the snapshots on the machine of rank `r`. Returns None if there is no such step above
    `after`. If not `may_send`, every rank must hold its own snapshot. Own snapshots are preferred.
    """
    num_ranks = len(told)
    holders: list[dict[int, int]] = []  # by rank: step to holder
    for rank in range(num_ranks):
        order = [rank, *(other for other in range(num_ranks) if other != rank)] if may_send else [rank]
        holders.append({step: holder for holder in reversed(order) for step in told[holder].get(rank, ())})
    common = set.intersection(*map(set, holders))
    step = max((one for one in common if one > after), default=None)
    return None if step is None else (step, [by_step[step] for by_step in holders])


def inherit(
    spec: WorkerSpec, memory: MemoryCheckpoint, exchange: Exchange, transport: Transport | None, after: int
) -> None:
    """Restore to each rank's `memory` the newest step above `after` with a snapshot of every rank.

    All ranks call this. It removes the previous attempt's snapshots from this machine. A rank without room
    for its snapshot skips it; `Recovery.agree` then finds no common step.
    """
    # Step 1: collect the snapshots of all machines.
    runs = list(left_behind(told_of(spec)))
    slots = _slots_in(runs, len(spec.plan.ranks))
    local = {rank: sorted(by_step) for rank, by_step in slots.items()}
    steps_on = [_read(one) for one in exchange.tell_all(json.dumps(local).encode())]
    # Step 2: copy or send the snapshots of the newest common step.
    found = givers_of(steps_on, after, may_send=transport is not None)
    if found is not None:
        step, holders = found
        for rank, holder in enumerate(holders):
            if rank == holder == spec.rank:
                _copy(slots[rank][step], memory)
            elif transport is not None and holder == spec.rank:
                send_slot(transport, rank, slots[rank][step], back=True)
            elif transport is not None and rank == spec.rank:
                receive_slot(transport, holder, memory, back=True)
        print(f"rank {spec.rank}: the last attempt left the state after step {step} in memory", flush=True)
    # Step 3: remove the previous attempt's memory, once every rank is done.
    exchange.meet()
    for run in runs:
        remove_left_behind(run)


def _slots_in(runs: Sequence[str], num_ranks: int) -> dict[int, dict[int, MemorySlot]]:
    """Return the valid snapshots of the leases `runs`, by rank and step."""
    found: dict[int, dict[int, MemorySlot]] = {}
    for run in runs:
        for rank in range(num_ranks):
            one = MemoryCheckpoint(run, rank)
            for step in one.steps():
                slot = one.slot(step)
                if slot is not None:
                    found.setdefault(rank, {})[step] = slot
    return found


def _read(told: bytes) -> dict[int, list[int]]:
    """Return the snapshot steps of a JSON message, by rank."""
    return {int(rank): steps for rank, steps in json.loads(told).items()}


def _copy(source: MemorySlot, memory: MemoryCheckpoint) -> None:
    """Copy the snapshot of `source` over the older one of `memory`, if there is room."""
    found = source.copy()
    if found is None:
        return
    label, data = found
    slot = memory.spare_slot()
    try:
        buffer = slot.begin(data.numel())
    except UnavailableError as error:
        print(f"warning: the snapshot of the last attempt is not restored: {error}", flush=True)
        return
    buffer[: data.numel()].copy_(data)
    memory.put(slot, slot.adopt(label))
