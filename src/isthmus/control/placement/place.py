"""`place`: the stages compute, storage and network over what is free; candidates best first, and refusals.

Best is: fewest crossings of the WAN, then fewest clusters, then the least price; among equals the tightest
fit, so that roomy clusters stay free for what needs them. Candidates on other clusters come before others of
the same clusters. The price decides among the first `LOOK_AT` candidates of each number of crossings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from isthmus.control.placement.resources.free_resources import Resources, Site
from isthmus.control.placement.resources.requirement import Requirement
from isthmus.control.placement.stages.cluster_room import Room
from isthmus.control.placement.stages.compute_refusals import compute_refusals, never
from isthmus.control.placement.stages.compute_stage import ComputeStage, Ranges, Work
from isthmus.control.placement.stages.explain_stages import explain
from isthmus.control.placement.stages.network_stage import NetworkStage
from isthmus.control.placement.stages.storage_stage import StorageStage
from isthmus.core.job import Placement
from isthmus.core.plan import Refusal

LOOKS, LOOKS_EACH = 10_000, 250
"""Looks at clusters that one search may take, all owners together: so many, or so many for each cluster."""

LOOK_AT = 48
"""Candidates compared for each number of crossings."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Where every stage of all pipelines would run, what it costs an hour, and why it can be there."""

    ranges: Ranges
    price_per_hour: float = 0.0
    why: str = ""

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters in pipeline order, each once."""
        return tuple(dict.fromkeys(one.cluster for one in self.ranges))

    @property
    def crossings(self) -> int:
        """How often a pipeline crosses the WAN."""
        return len(self.ranges) - 1


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Candidates, best first; refusals by stage; `whole` unless the search ended before it had seen all.

    Compute refusals are given where there is no candidate.
    """

    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...] = ()
    whole: bool = True


def place(requirement: Requirement, resources: Resources, switches: Placement, keep: int = 3) -> Placements:
    """Return up to `keep` ways to place `requirement` on what is free, within the job's `switches`."""
    refusal = never(requirement.chips, requirement.num_cards, switches)
    if refusal:
        return Placements(candidates=(), refused=(refusal,))
    rooms = sorted(_rooms(requirement, resources, switches), key=_room_order)
    storage = StorageStage(requirement, resources)
    network = NetworkStage(requirement, resources, network=switches.network)
    groups = _groups(rooms, switches.several_owners)
    looks = max(LOOKS, LOOKS_EACH * len(rooms))
    work = [Work(looks // len(groups)) for _ in groups]
    searches = [
        ComputeStage(requirement, group, network, storage, left)
        for group, left in zip(groups, work, strict=True)
    ]
    found = _search(requirement, searches, rooms, keep)
    refused = [*storage.refusals(), *network.refusals()]
    whole = not any(one.over for one in work)
    if not found:
        refused = [*compute_refusals(requirement, rooms, groups, whole=whole), *refused]
    candidates = tuple(replace(one, why=explain(one.ranges, requirement, resources)) for one in found)
    return Placements(candidates=candidates, refused=tuple(refused), whole=whole)


def _rooms(requirement: Requirement, resources: Resources, switches: Placement) -> list[Room]:
    """Return the clusters that the switches admit."""
    return [
        Room(requirement, site, reads_data=_reads_data(site, switches))
        for site in resources.sites.values()
        if (not switches.clusters or site.name in switches.clusters)
        and (not switches.owners or site.owner in switches.owners)
        and (not switches.regions or site.region in switches.regions)
    ]


def _reads_data(site: Site, switches: Placement) -> bool:
    return (not switches.data_owners or site.owner in switches.data_owners) and (
        not switches.data_regions or site.region in switches.data_regions
    )


def _room_order(room: Room) -> tuple[float, int, str]:
    """Cheapest first, then those with the fewest places, so that roomy ones are kept."""
    whole = room.requirement.counts(0, room.requirement.num_stages)
    return (room.price(whole), sum(room.places), room.name)


def _groups(rooms: Sequence[Room], several_owners: bool) -> list[list[Room]]:
    """Return the rooms that may be used together: all, or those of each owner."""
    if several_owners or not rooms:
        return [list(rooms)]
    owners = sorted({room.site.owner for room in rooms})
    return [[room for room in rooms if room.site.owner == owner] for owner in owners]


def _search(
    requirement: Requirement, searches: Sequence[ComputeStage], rooms: Sequence[Room], keep: int
) -> list[Candidate]:
    """Return the best candidates, of as few crossings as give `keep` of them."""
    by_name = {room.name: room for room in rooms}
    found: list[Candidate] = []
    for number in range(1, requirement.num_stages + 1):
        for search in searches:
            for ranges in itertools.islice(search.ranges_over(number), LOOK_AT):
                counts = [(by_name[one.cluster], requirement.counts(one.first, one.last)) for one in ranges]
                price = sum(room.price(count) for room, count in counts)
                found.append(Candidate(ranges=ranges, price_per_hour=price))
        if len(found) >= keep:
            break
    order = {room.name: place for place, room in enumerate(rooms)}
    found.sort(key=lambda one: _order(one, order))
    return varied(found, keep)


def _order(one: Candidate, order: dict[str, int]) -> tuple[object, ...]:
    places = tuple(order[name] for name in one.clusters)
    return (one.crossings, len(one.clusters), one.price_per_hour, places, one.ranges)


class _Placed(Protocol):
    @property
    def clusters(self) -> tuple[str, ...]: ...


_One = TypeVar("_One", bound=_Placed)


def varied(ordered: Sequence[_One], keep: int) -> list[_One]:
    """Return `keep` candidates in the same order: first the best of each set of clusters, then others."""
    first: dict[frozenset[str], _One] = {}
    for one in ordered:
        first.setdefault(frozenset(one.clusters), one)
    chosen = list(first.values())[:keep]
    chosen += [one for one in ordered if one not in chosen][: keep - len(chosen)]
    return sorted(chosen, key=ordered.index)
