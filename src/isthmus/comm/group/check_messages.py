"""`check_messages`: the messages and the barrier of the conformance kit for process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from isthmus.comm.transport.check_transport import expect, run_on_ranks

LIMIT = timedelta(seconds=30)


def check_messages(groups: Sequence[Any]) -> None:
    """Check point-to-point messages and the barrier; `groups[r]` is rank `r` of one group of at least two ranks."""
    for rule in (_tags_match, _ring_exchange, _tensor_types, _any_source):
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
        work.wait(LIMIT)
    if rank == size - 1:
        expect(all(float(tensor) == tag for tag, tensor in received.items()), "messages match by tag")


def _ring_exchange(group: Any) -> None:
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(300_000)
    works = [group.send([torch.full((300_000,), float(rank))], after, 1), group.recv([got], before, 1)]
    for work in works:
        work.wait(LIMIT)
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
            group.send([kind.contiguous()], size - 1, 0).wait(LIMIT)
    elif rank == size - 1:
        for kind in kinds:
            got = torch.zeros(kind.shape, dtype=kind.dtype)
            group.recv([got], 0, 0).wait(LIMIT)
            expect(torch.equal(got, kind), f"a tensor of {kind.dtype} and shape {tuple(kind.shape)} arrives")


def _any_source(group: Any) -> None:
    rank, size = group.rank(), group.size()
    if rank > 0:
        group.send([torch.tensor([[float(rank)]])], 0, 4).wait(LIMIT)
        return
    sources = []
    for _ in range(1, size):
        got = torch.zeros(1, 1)
        work = group.recv_anysource([got], 4)
        work.wait(LIMIT)
        sources.append(work._source_rank())
        expect(float(got) == sources[-1], "a receive without a source names the rank whose message it took")
    expect(sorted(sources) == list(range(1, size)), "receives without a source take the messages of all ranks")


def _barrier(groups: Sequence[Any]) -> None:
    came: list[int] = []

    def run(group: Any) -> None:
        came.append(group.rank())
        group.barrier().wait(LIMIT)
        expect(len(came) == group.size(), "no rank passes a barrier before all have reached it")

    run_on_ranks(groups, run)
