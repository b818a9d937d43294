"""`place_pipelines`: places for equal pipelines on the free resources, best first; and refusals.

Candidates are ordered by WAN crossings, then clusters, then price; ties go to the tightest fit, which keeps
large clusters free. Candidates on different sets of clusters come before others on the same set. The price is
compared among the first `MAX_CANDIDATES` candidates of each number of crossings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from isthmus.control.placement.filters.cluster_capacity import ClusterCapacity
from isthmus.control.placement.filters.compute_refusals import compute_refusals, constraint_refusal
from isthmus.control.placement.filters.compute_search import ComputeSearch, LookupBudget, StageRanges
from isthmus.control.placement.filters.explain_placement import explain_placement
from isthmus.control.placement.filters.network_filter import NetworkFilter
from isthmus.control.placement.filters.storage_filter import StorageFilter
from isthmus.control.placement.resources.free_resources import FreeResources
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement
from isthmus.core.job import PlacementConstraints
from isthmus.core.plan import Refusal

MAX_LOOKUPS, LOOKUPS_PER_CLUSTER = 10_000, 250
"""Budget of cluster lookups of one search over all owners: the larger of a total and a number per cluster."""

MAX_CANDIDATES = 48
"""Candidates compared for each number of crossings."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The place of every stage of equal pipelines, its price per hour, and the reasons why it fits."""

    ranges: StageRanges
    price_per_hour: float = 0.0
    why: str = ""

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters in pipeline order, each once."""
        return tuple(dict.fromkeys(one.cluster for one in self.ranges))

    @property
    def wan_crossings(self) -> int:
        """Number of WAN crossings of a pipeline."""
        return len(self.ranges) - 1


@dataclass(frozen=True, kw_only=True)
class PlacementResult:
    """Candidates, best first, and refusals; compute refusals only if there is no candidate."""

    candidates: tuple[Candidate, ...]
    refused: tuple[Refusal, ...] = ()
    # False if the lookup budget ran out before the search was complete.
    exhaustive: bool = True


def place_pipelines(
    requirement: PipelineRequirement,
    resources: FreeResources,
    constraints: PlacementConstraints,
    keep: int = 3,
) -> PlacementResult:
    """Return up to `keep` ways to place `requirement` on the free resources, within the job's constraints."""
    refusal = constraint_refusal(requirement.chips, requirement.num_devices, constraints)
    if refusal:
        return PlacementResult(candidates=(), refused=(refusal,))
    capacities = sorted(_cluster_capacities(requirement, resources, constraints), key=_capacity_order)
    storage = StorageFilter(requirement, resources)
    network = NetworkFilter(requirement, resources, network=constraints.network)
    groups = _owner_groups(capacities, constraints.several_owners)
    lookups = max(MAX_LOOKUPS, LOOKUPS_PER_CLUSTER * len(capacities))
    budgets = [LookupBudget(lookups // len(groups)) for _ in groups]
    searches = [
        ComputeSearch(requirement, group, network, storage, budget)
        for group, budget in zip(groups, budgets, strict=True)
    ]
    found = _search(requirement, searches, capacities, keep)
    refused = [*storage.refusals(), *network.refusals()]
    exhaustive = not any(one.exhausted for one in budgets)
    if not found:
        refused = [*compute_refusals(requirement, capacities, groups, exhaustive=exhaustive), *refused]
    candidates = tuple(replace(one, why=explain_placement(one.ranges, requirement, resources)) for one in found)
    return PlacementResult(candidates=candidates, refused=tuple(refused), exhaustive=exhaustive)


def _cluster_capacities(
    requirement: PipelineRequirement, resources: FreeResources, constraints: PlacementConstraints
) -> list[ClusterCapacity]:
    """Return the capacity of every cluster that the constraints admit."""
    return [
        ClusterCapacity(requirement, site, reads_data=constraints.may_read_data(site.owner, site.region))
        for site in resources.sites.values()
        if constraints.admits(site.name, site.owner, site.region)
    ]


def _capacity_order(capacity: ClusterCapacity) -> tuple[float, int, str]:
    """Sort key: cheapest first, then fewest slots, which keeps large clusters free."""
    counts = capacity.requirement.count_by_size(0, capacity.requirement.num_stages)
    return (capacity.price_per_hour(counts), sum(capacity.slots), capacity.name)


def _owner_groups(capacities: Sequence[ClusterCapacity], several_owners: bool) -> list[list[ClusterCapacity]]:
    """Return the sets of clusters that may be used together: one of all, or one per owner."""
    if several_owners or not capacities:
        return [list(capacities)]
    owners = sorted({room.site.owner for room in capacities})
    return [[room for room in capacities if room.site.owner == owner] for owner in owners]


def _search(
    requirement: PipelineRequirement,
    searches: Sequence[ComputeSearch],
    capacities: Sequence[ClusterCapacity],
    keep: int,
) -> list[Candidate]:
    """Return the best candidates; add WAN crossings until `keep` candidates are found."""
    by_name = {room.name: room for room in capacities}
    found: list[Candidate] = []
    for number in range(1, requirement.num_stages + 1):
        for search in searches:
            for ranges in itertools.islice(search.ranges_over(number), MAX_CANDIDATES):
                counts = [(by_name[one.cluster], requirement.count_by_size(one.first, one.last)) for one in ranges]
                price = sum(room.price_per_hour(count) for room, count in counts)
                found.append(Candidate(ranges=ranges, price_per_hour=price))
        if len(found) >= keep:
            break
    order = {room.name: place for place, room in enumerate(capacities)}
    found.sort(key=lambda one: _candidate_order(one, order))
    return diverse_first(found, keep)


def _candidate_order(one: Candidate, order: dict[str, int]) -> tuple[object, ...]:
    places = tuple(order[name] for name in one.clusters)
    return (one.wan_crossings, len(one.clusters), one.price_per_hour, places, one.ranges)


class _HasClusters(Protocol):
    @property
    def clusters(self) -> tuple[str, ...]: ...


_PlacementT = TypeVar("_PlacementT", bound=_HasClusters)


def diverse_first(ordered: Sequence[_PlacementT], keep: int) -> list[_PlacementT]:
    """Return `keep` of the ordered candidates in order, preferring the best of each set of clusters."""
    first: dict[frozenset[str], _PlacementT] = {}
    for one in ordered:
        first.setdefault(frozenset(one.clusters), one)
    chosen = list(first.values())[:keep]
    chosen += [one for one in ordered if one not in chosen][: keep - len(chosen)]
    return sorted(chosen, key=ordered.index)
