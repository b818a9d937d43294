"""`join_tp_group`: create the process group of the tensor-parallel ranks of each stage."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.core.plan import Plan
from isthmus.train.communication.torch_device import HOST_BACKENDS
from isthmus.train.communication.torch_process_group import GROUP_TIMEOUT
from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup


def make_tp_group(plan: Plan, rank: int) -> TensorParallelGroup:
    """Return the tensor-parallel group of the stage of `rank`, not joined yet."""
    mine = plan.ranks[rank]
    size = plan.stages[mine.stage].tp
    return TensorParallelGroup(mine.tp, size, sequence_parallel=size > 1 and plan.stages[mine.stage].sp)


def join_tp_group(plan: Plan, rank: int, group: TensorParallelGroup, *, backend: str, device: torch.device) -> None:
    """Join `group`, the tensor-parallel group of the stage of `rank`; all ranks of the run call this.

    Its tensors stay on `device` where a vendor's library sums them there, else they pass host memory. Raises
    `PeerError` if a rank does not join.
    """
    shares = ((number, cp) for number, stage in enumerate(plan.stages) for cp in range(stage.cp))
    for ranks in (plan.tp_ranks_of(number, cp) for number, cp in shares):
        new = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT) if len(ranks) > 1 else None
        if new is not None and rank in ranks:
            by_library = isinstance(new, IsthmusGroup) and new.has_library(device.type)
            group.join(new, on_host=backend in HOST_BACKENDS and not by_library)
