"""Threads of this process that share a stage, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from isthmus.train.tensor_parallel.tensor_group import TensorGroup

_Result = TypeVar("_Result")


def tensor_groups(size: int, *, cuts_sequence: bool = False) -> list[TensorGroup]:
    """Return the groups of `size` ranks that share a stage, joined."""
    cuts = cuts_sequence and size > 1
    store, groups = dist.HashStore(), [TensorGroup(one, size, cuts_sequence=cuts) for one in range(size)]

    def join(group: TensorGroup) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        group.join(dist.ProcessGroupGloo(store, group.index, size, options))

    each(groups, join)
    return groups


def each(groups: list[TensorGroup], run: Callable[[TensorGroup], _Result]) -> list[_Result]:
    """Run all ranks at once; return their results."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [one.result(60) for one in [pool.submit(run, group) for group in groups]]
