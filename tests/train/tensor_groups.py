"""Threads of this process that share a stage, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from isthmus.comm.group.vendors.gloo_vendor import gloo_group
from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup

_Result = TypeVar("_Result")


def tensor_groups(size: int, *, cuts_sequence: bool = False) -> list[TensorParallelGroup]:
    """Return the groups of `size` ranks that share a stage, joined."""
    cuts = cuts_sequence and size > 1
    store, groups = (
        dist.HashStore(),
        [TensorParallelGroup(one, size, sequence_parallel=cuts) for one in range(size)],
    )

    def join(group: TensorParallelGroup) -> None:
        group.join(gloo_group(store, group.tp_rank, size, "127.0.0.1", timedelta(seconds=30)))

    each(groups, join)
    return groups


def each(groups: list[TensorParallelGroup], run: Callable[[TensorParallelGroup], _Result]) -> list[_Result]:
    """Run all ranks at once; return their results."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [one.result(60) for one in [pool.submit(run, group) for group in groups]]
