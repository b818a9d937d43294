"""Threads of this process that share experts, joined by a group over memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import MappingProxyType
from typing import TypeVar

from isthmus.comm.group.composed.device_messages import DeviceMessages
from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.plan import Plan
from isthmus.train.communication.device_exchange import EXPERT_TAGS, DeviceExchange
from isthmus.train.expert_parallel.ep_process_group import make_ep_group
from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup

_Result = TypeVar("_Result")


def joined_groups(size: int) -> list[ExpertParallelGroup]:
    """Return the groups of `size` ranks that share experts, joined."""
    groups = [ExpertParallelGroup(rank, range(size)) for rank in range(size)]
    _join(groups)
    return groups


def groups_of_plan(plan: Plan, world: Sequence[IsthmusGroup] = ()) -> list[ExpertParallelGroup | None]:
    """Return the expert group of each rank of `plan`, joined; by the devices of the group `world` of all ranks."""
    groups = [make_ep_group(plan, rank) for rank in range(len(plan.ranks))]
    _join([group for group in groups if group is not None], {one.rank(): one.device_messages for one in world})
    return groups


def each(groups: Sequence[ExpertParallelGroup], run: Callable[[ExpertParallelGroup], _Result]) -> list[_Result]:
    """Run all ranks at once; return their results."""
    with ThreadPoolExecutor(len(groups) or 1) as pool:
        return [one.result(60) for one in [pool.submit(run, group) for group in groups]]


def _join(
    groups: Sequence[ExpertParallelGroup], devices: Mapping[int, DeviceMessages | None] = MappingProxyType({})
) -> None:
    transports = {group.ranks: memory_transports(group.size) for group in groups}
    for group in groups:
        if group.size > 1:
            transport = transports[group.ranks][group.expert_rank]
            near = devices.get(group.ranks[group.expert_rank])
            exchange = DeviceExchange(near, group.ranks, EXPERT_TAGS) if near else None
            joined = IsthmusGroup(transport, ["a"] * group.size, timeout=timedelta(seconds=30))
            group.join(joined, devices=exchange)
