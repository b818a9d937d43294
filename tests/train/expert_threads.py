"""Threads of this process that share experts, joined by the in-memory transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.plan import Plan
from isthmus.train.expert_parallel.ep_process_group import make_ep_group
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup

_Result = TypeVar("_Result")


@contextmanager
def joined_groups(size: int) -> Iterator[list[ExpertParallelGroup]]:
    """Yield the groups of `size` ranks that share experts, joined."""
    groups = [ExpertParallelGroup(rank, range(size)) for rank in range(size)]
    carriers = _join(groups)
    try:
        yield groups
    finally:
        for one in carriers:
            one.shutdown()


def groups_of_plan(plan: Plan) -> tuple[list[ExpertParallelGroup | None], list[IsthmusGroup]]:
    """Return the expert group of each rank of `plan`, joined, and what carries them, for the caller to shut down."""
    groups = [make_ep_group(plan, rank) for rank in range(len(plan.ranks))]
    return groups, _join([group for group in groups if group is not None])


def each(groups: Sequence[ExpertParallelGroup], run: Callable[[ExpertParallelGroup], _Result]) -> list[_Result]:
    """Run all ranks at once; return their results."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [one.result(60) for one in [pool.submit(run, group) for group in groups]]


def _join(groups: Sequence[ExpertParallelGroup]) -> list[IsthmusGroup]:
    several = {group.ranks: memory_transports(group.size) for group in groups if group.size > 1}
    carriers = {ranks: [IsthmusGroup(one, ["a"] * len(ranks)) for one in of] for ranks, of in several.items()}
    for group in groups:
        if group.size > 1:
            group.join(carriers[group.ranks][group.expert_rank])
    return [one for of in carriers.values() for one in of]
