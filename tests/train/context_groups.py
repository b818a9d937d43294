"""Threads of this process that share sequences, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from isthmus.comm.group.vendors.gloo_vendor import gloo_group
from isthmus.train.context_parallel.context_parallel_group import ContextKind, ContextParallelGroup
from isthmus.train.context_parallel.sequence_shares import share_sequence

_Result = TypeVar("_Result")


def context_groups(num_tokens: int, weights: Sequence[float], kind: ContextKind) -> list[ContextParallelGroup]:
    """Return the groups of ranks that share `num_tokens` tokens by `weights`, joined."""
    shares, store = share_sequence(num_tokens, weights), dist.HashStore()
    groups = [ContextParallelGroup(rank, shares, kind=kind) for rank in range(len(shares))]

    def join(group: ContextParallelGroup) -> None:
        if group.size > 1:
            group.join(gloo_group(store, group.cp_rank, group.size, "127.0.0.1", timedelta(seconds=30)))

    each(groups, join)
    return groups


def each(groups: Sequence[ContextParallelGroup], run: Callable[[ContextParallelGroup], _Result]) -> list[_Result]:
    """Run all ranks at once; return their results."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [one.result(60) for one in [pool.submit(run, group) for group in groups]]
