"""`meet_sharers`: create the process group of the tensor-parallel ranks of each stage."""

from __future__ import annotations

import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.group.local_gloo import local_group
from isthmus.core.plan import Plan
from isthmus.train.messages.device import HOST_BACKENDS
from isthmus.train.messages.vendor_group import GROUP_TIMEOUT
from isthmus.train.tensor_parallel.tensor_group import TensorGroup


def sharers_of(plan: Plan, rank: int) -> TensorGroup:
    """Return the tensor-parallel group of the stage of `rank`, not joined yet."""
    mine = plan.ranks[rank]
    size = len(plan.ranks_of(mine.stage))
    return TensorGroup(mine.tp, size, cuts_sequence=size > 1 and plan.stages[mine.stage].sp)


def meet_sharers(plan: Plan, rank: int, group: TensorGroup, *, backend: str, host: str) -> None:
    """Join `group`, the tensor-parallel group of the stage of `rank`; all ranks of the run call this.

    The Isthmus backend cannot be split, so with it the ranks of a stage use gloo; `host` is this rank's
    address inside its cluster. Raises `PeerError` if a rank does not join.
    """
    world = dist.group.WORLD
    if isinstance(world, IsthmusGroup):
        stages = [str(one.stage) for one in plan.ranks]
        made = local_group(world.transport, stages, host, GROUP_TIMEOUT)
        if made is not None:
            group.join(made)
        return
    for stage in range(len(plan.stages)):
        ranks = plan.ranks_of(stage)
        new = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if new is not None and rank in ranks:
            group.join(new, on_host=backend in HOST_BACKENDS)
