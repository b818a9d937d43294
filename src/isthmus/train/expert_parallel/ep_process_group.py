"""`make_ep_group` and `join_ep_group`: the process group of the ranks that share the experts of their layers."""

from __future__ import annotations

import torch.distributed as dist

from isthmus.core.plan import Plan
from isthmus.core.runs.runnable.expert_groups import expert_groups
from isthmus.train.communication.device_exchange import EXPERT_TAGS, find_device_exchange
from isthmus.train.communication.torch_device import HOST_BACKENDS
from isthmus.train.communication.torch_process_group import GROUP_TIMEOUT
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup


def make_ep_group(plan: Plan, rank: int) -> ExpertParallelGroup | None:
    """Return the group that deals out the experts of the stage of `rank`, not joined yet; None if `tp` slices them.

    In a plan with `ep` above 1 a rank that holds all experts is a group of its own, so that all holders of a layer cut
    its experts the same way.
    """
    groups, stage = expert_groups(plan), plan.stage_of(rank)
    if rank in groups:
        return ExpertParallelGroup(groups[rank].index(rank), groups[rank])
    return ExpertParallelGroup(0, (rank,)) if groups and stage.tp == 1 else None


def join_ep_group(plan: Plan, rank: int, group: ExpertParallelGroup | None, *, backend: str) -> None:
    """Join `group`, the expert-parallel group of `rank` if it has one; all ranks of the run call this.

    Raises `PeerError` if a rank does not join.
    """
    for ranks in dict.fromkeys(expert_groups(plan).values()):
        new = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT)
        if group is not None and rank in ranks:
            devices = find_device_exchange(ranks, EXPERT_TAGS)
            group.join(new, on_host=backend in HOST_BACKENDS, devices=devices)
