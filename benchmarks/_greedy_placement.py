"""The report's way of placing a job, as a peer: greedy ranges, then filters (cross-domain pooling, 4.2.3).

The widest range that a cluster holds, from there on the next; storage and network are asked when all is laid.
In the report's favour what a range took is deducted, and equally wide ranges go to the cheapest cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.placement.place import _groups, _room_order, _rooms
from isthmus.control.placement.resources.free_resources import Resources
from isthmus.control.placement.resources.requirement import Range, Requirement
from isthmus.control.placement.stages.cluster_room import Room
from isthmus.control.placement.stages.compute_refusals import never
from isthmus.control.placement.stages.network_stage import NetworkStage
from isthmus.control.placement.stages.storage_stage import StorageStage
from isthmus.core.job import Placement


def greedy_placement(
    requirement: Requirement, resources: Resources, switches: Placement
) -> tuple[Range, ...] | None:
    """Return the one plan that the greedy finds and no filter refuses, or None."""
    if never(requirement.chips, requirement.num_cards, switches):
        return None
    rooms = sorted(_rooms(requirement, resources, switches), key=_room_order)
    storage = StorageStage(requirement, resources)
    network = NetworkStage(requirement, resources, network=switches.network)
    for group in _groups(rooms, switches.several_owners):
        laid = _ranges(requirement, group)
        if laid and _passes(laid, group, storage, network):
            return laid
    return None


def _ranges(requirement: Requirement, rooms: Sequence[Room]) -> tuple[Range, ...] | None:
    found: list[Range] = []
    used = {room.name: (0,) * len(requirement.sizes) for room in rooms}
    first, count = 0, requirement.num_stages
    while first < count:
        last, room = max(
            ((one.reach_beside(first, used[one.name]), one) for one in rooms),
            key=lambda each: each[0],
            default=(first, None),
        )
        if room is None or last == first:
            return None
        more = requirement.counts(first, last)
        used[room.name] = tuple(a + b for a, b in zip(used[room.name], more, strict=True))
        found.append(Range(first, last, room.name))
        first = last
    return tuple(found)


def _passes(
    laid: tuple[Range, ...], rooms: Sequence[Room], storage: StorageStage, network: NetworkStage
) -> bool:
    readers = {room.name for room in rooms if room.reads_data}
    if not {laid[0].cluster, laid[-1].cluster} <= readers:
        return False
    return all(storage.stores(laid[: n + 1]) for n in range(len(laid))) and all(
        network.joins(laid[:n], laid[n].cluster) for n in range(1, len(laid))
    )
