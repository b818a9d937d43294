"""The report's way of placing a job, as a peer: greedy ranges, then filters (cross-domain pooling, 4.2.3).

The widest range that a cluster holds, from there on the next; storage and network are asked when all is laid.
In the report's favour what a range took is deducted, and equally wide ranges go to the cheapest cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.placement.filters.cluster_capacity import ClusterCapacity
from isthmus.control.placement.filters.compute_refusals import constraint_refusal
from isthmus.control.placement.filters.network_filter import NetworkFilter
from isthmus.control.placement.filters.storage_filter import StorageFilter
from isthmus.control.placement.place_pipelines import _capacity_order, _cluster_capacities, _owner_groups
from isthmus.control.placement.resources.free_resources import FreeResources
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement, StageRange
from isthmus.core.job import PlacementConstraints


def greedy_placement(
    requirement: PipelineRequirement, resources: FreeResources, switches: PlacementConstraints
) -> tuple[StageRange, ...] | None:
    """Return the one plan that the greedy finds and no filter refuses, or None."""
    if constraint_refusal(requirement.chips, requirement.num_devices, switches):
        return None
    rooms = sorted(_cluster_capacities(requirement, resources, switches), key=_capacity_order)
    storage = StorageFilter(requirement, resources)
    network = NetworkFilter(requirement, resources, network=switches.network)
    for group in _owner_groups(rooms, switches.several_owners):
        laid = _ranges(requirement, group)
        if laid and _passes(laid, group, storage, network):
            return laid
    return None


def _ranges(requirement: PipelineRequirement, rooms: Sequence[ClusterCapacity]) -> tuple[StageRange, ...] | None:
    found: list[StageRange] = []
    used = {room.name: (0,) * len(requirement.sizes) for room in rooms}
    first, count = 0, requirement.num_stages
    while first < count:
        last, room = max(
            ((one.max_range_end_beside(first, used[one.name]), one) for one in rooms),
            key=lambda each: each[0],
            default=(first, None),
        )
        if room is None or last == first:
            return None
        more = requirement.count_by_size(first, last)
        used[room.name] = tuple(a + b for a, b in zip(used[room.name], more, strict=True))
        found.append(StageRange(first, last, room.name))
        first = last
    return tuple(found)


def _passes(
    laid: tuple[StageRange, ...],
    rooms: Sequence[ClusterCapacity],
    storage: StorageFilter,
    network: NetworkFilter,
) -> bool:
    readers = {room.name for room in rooms if room.reads_data}
    if not {laid[0].cluster, laid[-1].cluster} <= readers:
        return False
    return all(storage.can_store(laid[: n + 1]) for n in range(len(laid))) and all(
        network.can_follow(laid[:n], laid[n].cluster) for n in range(1, len(laid))
    )
