"""`inherit`: what an attempt takes over from the shared memory that the one before has left on its machines.

A rank finds its own snapshots where it runs on the same machine again, and those that its machine holds for
others. The newest state that all ranks have somewhere is brought to them: a rank that begins elsewhere gets
its copy back from the machine that holds it.
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
"""The steps of the snapshots of each rank that are on one machine."""


def givers_of(told: Sequence[Places], after: int, *, may_send: bool) -> tuple[int, list[int]] | None:
    """Return the newest step of which each rank's snapshot is somewhere, and by rank where: at which rank.

    `told` is what each rank sees. None where there is none of more than `after` steps. Unless they `may_send`
    each other, every rank must see its own.
    """
    size = len(told)
    found: list[dict[int, int]] = []
    for rank in range(size):
        order = [rank, *(other for other in range(size) if other != rank)] if may_send else [rank]
        found.append({step: giver for giver in reversed(order) for step in told[giver].get(rank, ())})
    common = set.intersection(*map(set, found))
    step = max((one for one in common if one > after), default=None)
    return None if step is None else (step, [of_rank[step] for of_rank in found])


def inherit(
    spec: WorkerSpec, memory: MemoryCheckpoint, exchange: Exchange, transport: Transport | None, after: int
) -> None:
    """Bring to each rank's `memory` the newest state that all have left, if it is of more than `after` steps.

    All ranks call it. What was left on this machine is removed. A rank that has no room for its own goes
    without, and so do all: `Recovery.agree` finds no step that all have.
    """
    runs = list(left_behind(told_of(spec)))
    slots = _slots_in(runs, len(spec.plan.ranks))
    mine = {rank: sorted(of_rank) for rank, of_rank in slots.items()}
    told = [_read(one) for one in exchange.tell_all(json.dumps(mine).encode())]
    found = givers_of(told, after, may_send=transport is not None)
    if found is not None:
        step, givers = found
        for rank, giver in enumerate(givers):
            if rank == giver == spec.rank:
                _copy(slots[rank][step], memory)
            elif transport is not None and giver == spec.rank:
                send_slot(transport, rank, slots[rank][step], back=True)
            elif transport is not None and rank == spec.rank:
                receive_slot(transport, giver, memory, back=True)
        print(f"rank {spec.rank}: the last attempt left the state after step {step} in memory", flush=True)
    exchange.meet()
    for run in runs:
        remove_left_behind(run)


def _slots_in(runs: Sequence[str], num_ranks: int) -> dict[int, dict[int, MemorySlot]]:
    """Return the whole snapshots of the leases `runs`, by rank and step."""
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
    return {int(rank): steps for rank, steps in json.loads(told).items()}


def _copy(source: MemorySlot, memory: MemoryCheckpoint) -> None:
    """Put what `source` holds in the place of the older snapshot of `memory`, if there is room for it."""
    found = source.copy()
    if found is None:
        return
    label, data = found
    slot = memory.spare_slot()
    try:
        room = slot.begin(data.numel())
    except UnavailableError as error:
        print(f"warning: what the last attempt left is not taken over: {error}", flush=True)
        return
    room[: data.numel()].copy_(data)
    memory.put(slot, slot.adopt(label))
