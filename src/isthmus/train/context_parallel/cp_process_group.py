"""`make_cp_group` and `join_cp_group`: the process group of the ranks that share a sequence, of each stage."""

from __future__ import annotations

import torch.distributed as dist

from isthmus.core.plan import Plan, Stage
from isthmus.train.communication.device_exchange import CONTEXT_TAGS, find_device_exchange
from isthmus.train.communication.torch_device import HOST_BACKENDS
from isthmus.train.communication.torch_process_group import GROUP_TIMEOUT
from isthmus.train.context_parallel.context_parallel_group import ContextParallelGroup
from isthmus.train.context_parallel.sequence_shares import SequenceShare, share_sequence


def stage_shares(plan: Plan, stage: Stage) -> tuple[SequenceShare, ...]:
    """Return the tokens of each context-parallel rank of `stage`, in proportion to the rates that it states.

    Raises `PlanError` if the sequence is too short.
    """
    return share_sequence(plan.sequence_length, stage.cp_rates or [1.0] * stage.cp, stage.tp if stage.sp else 1)


def make_cp_group(plan: Plan, rank: int) -> ContextParallelGroup | None:
    """Return the context-parallel group of the stage of `rank`, not joined yet; None if no rank shares a sequence."""
    mine, stage = plan.ranks[rank], plan.stage_of(rank)
    if stage.cp == 1:
        return None
    return ContextParallelGroup(mine.cp, stage_shares(plan, stage), kind=stage.cp_kind)


def join_cp_group(plan: Plan, rank: int, group: ContextParallelGroup | None, *, backend: str) -> None:
    """Join `group`, the context-parallel group of `rank` if it has one; all ranks of the run call this.

    Raises `PeerError` if a rank does not join.
    """
    shards = ((number, tp) for number, stage in enumerate(plan.stages) if stage.cp > 1 for tp in range(stage.tp))
    for ranks in (plan.cp_ranks_of(number, tp) for number, tp in shards):
        new = dist.new_group(list(ranks), timeout=GROUP_TIMEOUT)
        if group is not None and rank in ranks:
            devices = find_device_exchange(ranks, CONTEXT_TAGS)
            group.join(new, on_host=backend in HOST_BACKENDS, devices=devices)
