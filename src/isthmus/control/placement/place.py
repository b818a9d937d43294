"""`place`: places for equal pipelines on the free resources, best first; and refusals.

Candidates are ordered by WAN crossings, then clusters, then price; ties go to the tightest fit, which keeps
large clusters free. Candidates on different sets of clusters come before others on the same set. The price is
compared among the first `LOOK_AT` candidates of each number of crossings.
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
"""Budget of cluster lookups of one search over all owners: the larger of a total and a number per cluster."""

LOOK_AT = 48
"""Candidates compared for each number of crossings."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The place of every stage of equal pipelines, its price per hour, and the reasons why it fits."""

    ranges: Ranges
    price_per_hour: float = 0.0
    why: str = ""

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters in pipeline order, each once."""
        return tuple(dict.fromkeys(one.cluster for one in self.ranges))

    @property
    def crossings(self) -> int:
        """Number of WAN crossings of a pipeline."""
        return len(self.ranges) - 1


@dataclass(frozen=True, kw_only=True)
class Placements:
    """Candidates, best first, and refusals; compute refusals only if there is no candidate."""

    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...] = ()
    # False if the lookup budget ran out before the search was complete.
    whole: bool = True


def place(requirement: Requirement, resources: Resources, switches: Placement, keep: int = 3) -> Placements:
    """Return up to `keep` ways to place `requirement` on the free resources, within the job's constraints."""
    refusal = never(requirement.chips, requirement.num_cards, switches)
    if refusal:
        return Placements(candidates=(), refused=(refusal,))
    capacities = sorted(_rooms(requirement, resources, switches), key=_room_order)
    storage = StorageStage(requirement, resources)
    network = NetworkStage(requirement, resources, network=switches.network)
    groups = _groups(capacities, switches.several_owners)
    lookups = max(LOOKS, LOOKS_EACH * len(capacities))
    budgets = [Work(lookups // len(groups)) for _ in groups]
    searches = [
        ComputeStage(requirement, group, network, storage, budget)
        for group, budget in zip(groups, budgets, strict=True)
    ]
    found = _search(requirement, searches, capacities, keep)
    refused = [*storage.refusals(), *network.refusals()]
    exhaustive = not any(one.over for one in budgets)
    if not found:
        refused = [*compute_refusals(requirement, capacities, groups, whole=exhaustive), *refused]
    candidates = tuple(replace(one, why=explain(one.ranges, requirement, resources)) for one in found)
    return Placements(candidates=candidates, refused=tuple(refused), whole=exhaustive)


def _rooms(requirement: Requirement, resources: Resources, switches: Placement) -> list[Room]:
    """Return the capacity of every cluster that the constraints admit."""
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
    """Sort key: cheapest first, then fewest slots, which keeps large clusters free."""
    counts = room.requirement.counts(0, room.requirement.num_stages)
    return (room.price(counts), sum(room.places), room.name)


def _groups(rooms: Sequence[Room], several_owners: bool) -> list[list[Room]]:
    """Return the sets of clusters that may be used together: one of all, or one per owner."""
    if several_owners or not rooms:
        return [list(rooms)]
    owners = sorted({room.site.owner for room in rooms})
    return [[room for room in rooms if room.site.owner == owner] for owner in owners]


def _search(
    requirement: Requirement, searches: Sequence[ComputeStage], rooms: Sequence[Room], keep: int
) -> list[Candidate]:
    """Return the best candidates; add WAN crossings until `keep` candidates are found."""
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
    """Return `keep` of the ordered candidates in order, preferring the best of each set of clusters."""
    first: dict[frozenset[str], _One] = {}
    for one in ordered:
        first.setdefault(frozenset(one.clusters), one)
    chosen = list(first.values())[:keep]
    chosen += [one for one in ordered if one not in chosen][: keep - len(chosen)]
    return sorted(chosen, key=ordered.index)
