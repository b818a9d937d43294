"""`check_disagreement`: the part of the conformance kit in which ranks call different collectives, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.transport.check_transport import expect, run_on_ranks

LIMIT = timedelta(seconds=25)
"""Longer than the time-out of the groups."""

NUM_ELEMENTS = (6, 200_000)
"""A short tensor and a long one, which may go different ways."""

Call = Callable[[Any, int], dist.Work]
"""A call of a rank's group with tensors of about that many elements."""


def _sum(group: Any, num: int) -> dist.Work:
    return group.allreduce([torch.ones(num)], dist.AllreduceOptions())


def _maximum(group: Any, num: int) -> dist.Work:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return group.allreduce([torch.ones(num)], options)


def _longer(group: Any, num: int) -> dist.Work:
    return _sum(group, num + 1)


def _other_type(group: Any, num: int) -> dist.Work:
    return group.allreduce([torch.ones(num, dtype=torch.int32)], dist.AllreduceOptions())


def _broadcast(group: Any, num: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([torch.ones(num)], options)


def _none(group: Any, num: int) -> None:
    del group, num


CASES = {"shape": _longer, "type": _other_type, "operation": _maximum, "order": _broadcast, "absence": _none}


def check_disagreement(make: Callable[[], Sequence[Any]]) -> None:
    """Check that every rank that calls gets an error, where the last one calls as `CASES` say.

    `make()` returns new groups, `groups[r]` is rank `r`, with a time-out of 20 s at most and an `abort`.
    """
    for name, other in CASES.items():
        for num in NUM_ELEMENTS if other is not _none else NUM_ELEMENTS[:1]:
            groups = make()
            _check_case(groups, name, other, num)
            run_on_ranks(groups, lambda group: group.abort())


def _check_case(groups: Sequence[Any], name: str, other: Callable[[Any, int], Any], num: int) -> None:
    last = len(groups) - 1

    def run(group: Any) -> str | None:
        work = (other if group.rank() == last else _sum)(group, num)
        if work is None:
            return "absent"
        try:
            work.wait(LIMIT)
        except Exception as error:
            return str(error)
        return None

    for rank, error in enumerate(run_on_ranks(groups, run)):
        expect(error is not None, f"rank {rank} gets an error where ranks disagree: {name} of {num} elements")
        expect(bool(error and error.strip()), f"the error of rank {rank} has a text: {name} of {num} elements")
