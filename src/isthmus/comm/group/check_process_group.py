"""`check_process_group`: the conformance kit for process groups; gloo and `isthmus` pass it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.transport.check_transport import expect, run_on_ranks


def check_process_group(groups: Sequence[Any]) -> None:
    """Check point-to-point and collectives; `groups[r]` is rank `r` of one group of at least two ranks."""
    for rule in (_tags_match, _ring_exchange, _tensor_types, _allreduce, _broadcast, _allgather):
        run_on_ranks(groups, rule)
    _barrier(groups)


def _tags_match(group: Any) -> None:
    rank, size = group.rank(), group.size()
    if rank == 0:
        works = [group.send([torch.tensor([float(tag)])], size - 1, tag) for tag in (3, 1, 2)]
    elif rank == size - 1:
        received = {tag: torch.zeros(1) for tag in (2, 3, 1)}
        works = [group.recv([tensor], 0, tag) for tag, tensor in received.items()]
    else:
        works = []
    for work in works:
        work.wait()
    if rank == size - 1:
        expect(all(float(tensor) == tag for tag, tensor in received.items()), "messages match by tag")


def _ring_exchange(group: Any) -> None:
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(300_000)
    works = [group.send([torch.full((300_000,), float(rank))], after, 1), group.recv([got], before, 1)]
    for work in works:
        work.wait()
    expect(bool((got == before).all()), "sends and receives around a ring complete without deadlock")


def _tensor_types(group: Any) -> None:
    rank, size = group.rank(), group.size()
    kinds = [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(2.5),
        torch.ones(4, dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ]
    if rank == 0:
        for kind in kinds:
            group.send([kind.contiguous()], size - 1, 0).wait()
    elif rank == size - 1:
        for kind in kinds:
            got = torch.zeros(kind.shape, dtype=kind.dtype)
            group.recv([got], 0, 0).wait()
            expect(torch.equal(got, kind), f"a tensor of {kind.dtype} and shape {tuple(kind.shape)} arrives")


def _allreduce(group: Any) -> None:
    rank, size = group.rank(), group.size()
    for op, expected in ((dist.ReduceOp.SUM, sum(range(size))), (dist.ReduceOp.MAX, size - 1)):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensor = torch.full((5,), float(rank), dtype=torch.float64)
        group.allreduce([tensor], options).wait()
        expect(bool((tensor == expected).all()), f"allreduce by {op}")


def _broadcast(group: Any) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = group.size() - 1, 0
    tensor = torch.full((3,), float(group.rank()))
    group.broadcast([tensor], options).wait()
    expect(bool((tensor == group.size() - 1).all()), "broadcast gives every rank the root's tensor")


def _allgather(group: Any) -> None:
    parts = [torch.zeros(2) for _ in range(group.size())]
    group.allgather([parts], [torch.full((2,), float(group.rank()))]).wait()
    expect(all(bool((part == rank).all()) for rank, part in enumerate(parts)), "allgather keeps order")


def _barrier(groups: Sequence[Any]) -> None:
    came: list[int] = []

    def run(group: Any) -> None:
        came.append(group.rank())
        group.barrier().wait()
        expect(len(came) == group.size(), "no rank passes a barrier before all have reached it")

    run_on_ranks(groups, run)
