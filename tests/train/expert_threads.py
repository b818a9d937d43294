"""Threads of this process that share experts, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from isthmus.comm.group.vendors.gloo_vendor import gloo_group
from isthmus.core.plan import Plan
from isthmus.train.expert_parallel.ep_process_group import make_ep_group
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup

_Result = TypeVar("_Result")


def joined_groups(size: int) -> list[ExpertParallelGroup]:
    """Return the groups of `size` ranks that share experts, joined."""
    groups = [ExpertParallelGroup(rank, range(size)) for rank in range(size)]
    _join(groups)
    return groups


def groups_of_plan(plan: Plan) -> list[ExpertParallelGroup | None]:
    """Return the expert group of each rank of `plan`, joined."""
    groups = [make_ep_group(plan, rank) for rank in range(len(plan.ranks))]
    _join([group for group in groups if group is not None])
    return groups


def each(groups: Sequence[ExpertParallelGroup], run: Callable[[ExpertParallelGroup], _Result]) -> list[_Result]:
    """Run all ranks at once; return their results."""
    with ThreadPoolExecutor(len(groups) or 1) as pool:
        return [one.result(60) for one in [pool.submit(run, group) for group in groups]]


def _join(groups: Sequence[ExpertParallelGroup]) -> None:
    stores = {group.ranks: dist.HashStore() for group in groups}

    def join(group: ExpertParallelGroup) -> None:
        if group.size > 1:
            store, kind = stores[group.ranks], dist.ProcessGroup.BackendType.GLOO
            gloo = gloo_group(store, group.expert_rank, group.size, "127.0.0.1", timedelta(seconds=30))
            whole = dist.ProcessGroup(store, group.expert_rank, group.size)
            whole._set_default_backend(kind)
            whole._register_backend(torch.device("cpu"), kind, gloo)
            group.join(whole)

    each(groups, join)
