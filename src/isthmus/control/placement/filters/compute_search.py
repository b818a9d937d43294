"""`ComputeSearch`: splits of a pipeline into contiguous ranges of stages, one cluster per range.

Cross-domain pooling report 4.2.3 (3): the longest range that a cluster holds is tried first, then shortened
from the end. Unlike the report, the search deducts the ranges placed so far (a cluster may have several) and
backtracks. Two bounds prune it: the remaining ranges cannot reach the last stage even on empty clusters, or
the reachable clusters have too few slots for the remaining stages. The storage and network filters check
every range as it is placed. Exact unless the lookup budget runs out (`LookupBudget.exhausted`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.control.placement.filters.cluster_capacity import ClusterCapacity
from isthmus.control.placement.filters.network_filter import NetworkFilter
from isthmus.control.placement.filters.storage_filter import StorageFilter
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement, StageRange

StageRanges = tuple[StageRange, ...]
UsedStages = dict[str, tuple[int, ...]]
"""Stages by size that are already placed at each cluster."""


@dataclass
class LookupBudget:
    """The cluster lookups left to one search; `exhausted` becomes true when they are exceeded."""

    lookups_left: int
    exhausted: bool = False

    def spend(self, lookups: int) -> bool:
        """Deduct lookups; return whether the budget sufficed."""
        self.lookups_left -= lookups
        self.exhausted = self.exhausted or self.lookups_left < 0
        return not self.exhausted


@dataclass
class ComputeSearch:
    """One search over `capacities`; among ranges of equal length their order decides.

    `network` decides which clusters may be neighbours, `storage` which can store the data of their stages.
    """

    requirement: PipelineRequirement
    capacities: Sequence[ClusterCapacity]
    network: NetworkFilter
    storage: StorageFilter
    budget: LookupBudget
    _first_stages: list[dict[str, int]] = field(default_factory=list)
    _range_ends: dict[tuple[str, int], int] = field(default_factory=dict)
    _reachable: dict[tuple[str, int], list[ClusterCapacity]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacities = [room for room in self.capacities if any(room.max_stages)]
        self._index = {room.name: place for place, room in enumerate(self.capacities)}

    @cached_property
    def _neighbours(self) -> dict[str, list[ClusterCapacity]]:
        """For each cluster, the clusters with a sufficient link to it."""
        return {
            room.name: [other for other in self.capacities if self.network.can_connect(room.name, other.name)]
            for room in self.capacities
        }

    def _earliest_starts(self, number: int) -> dict[str, int]:
        """Return for each cluster the earliest stage from which `number` ranges could reach the last stage.

        The first of these ranges is at that cluster. A bound, since it assumes empty clusters; clusters from
        which the last stage is unreachable are left out.
        """
        count = self.requirement.num_stages
        while len(self._first_stages) < number:
            found = {}
            for room in self.capacities:
                left = len(self._first_stages) + 1
                end, is_last = self._lowest_end(room, left), left == 1
                start = _first_stage_reaching(room.max_range_ends, end)
                if start is not None and (room.reads_data if is_last else end < count):
                    found[room.name] = start
            self._first_stages.append(found)
        return self._first_stages[number - 1]

    def ranges_over(self, number: int) -> Iterator[StageRanges]:
        """Yield every admitted split of all stages into exactly `number` ranges, longest ranges first."""
        if number <= self.requirement.num_stages:
            yield from self._extend((), {}, 0, number)

    def _extend(self, placed: StageRanges, used: UsedStages, first: int, ranges_left: int) -> Iterator[StageRanges]:
        """Yield the splits that extend `placed` by `ranges_left` ranges from stage `first` on."""
        if not self.budget.spend(len(self.capacities)) or not self._can_finish(placed, used, first, ranges_left):
            return
        count = self.requirement.num_stages
        for last, room in self._next_ranges(placed, used, first, ranges_left):
            extended = (*placed, StageRange(first, last, room.name))
            if not self.budget.spend(1):
                return
            if not self.storage.can_store(extended):
                continue
            if last == count:
                yield extended
                continue
            yield from self._extend(extended, self._with_range(used, extended[-1]), last, ranges_left - 1)

    def _can_finish(self, placed: StageRanges, used: UsedStages, first: int, ranges_left: int) -> bool:
        """Return whether the `ranges_left` largest reachable clusters have slots for the stages from `first` on."""
        wanted = self.requirement.count_by_size(first, self.requirement.num_stages)
        near = self._reachable_within(placed[-1].cluster, ranges_left) if placed else self.capacities
        bounds = [room.max_fitting(wanted, used.get(room.name)) for room in near]
        best = sum(bounds) if ranges_left >= len(bounds) else sum(heapq.nlargest(ranges_left, bounds))
        return best >= sum(wanted)

    def _reachable_within(self, name: str, hops: int) -> list[ClusterCapacity]:
        """Return the clusters reachable from a cluster over at most `hops` links."""
        if (name, hops) not in self._reachable:
            reachable = {room.name: room for room in self._neighbours[name]}
            for room in self._reachable_within(name, hops - 1) if hops > 1 else ():
                reachable.update({other.name: other for other in (room, *self._neighbours[room.name])})
            self._reachable[name, hops] = list(reachable.values())
        return self._reachable[name, hops]

    def _next_ranges(
        self, placed: StageRanges, used: UsedStages, first: int, ranges_left: int
    ) -> list[tuple[int, ClusterCapacity]]:
        """Return (end, cluster) of the next range: every cluster's longest range, then one stage less."""
        count, starts = self.requirement.num_stages, self._earliest_starts(ranges_left)
        highest, found = count - ranges_left + 1, []
        for room in self._neighbours[placed[-1].cluster] if placed else self.capacities:
            if starts.get(room.name, count) > first or (first == 0 and not room.reads_data):
                continue
            taken = used.get(room.name)
            reach = room.max_range_ends[first] if taken is None else room.max_range_end_beside(first, taken)
            lowest, widest = max(first + 1, self._lowest_end(room, ranges_left)), min(reach, highest)
            if widest < lowest or (placed and not self.network.can_follow(placed, room.name)):
                continue
            place = self._index[room.name]
            found += [(widest - last, -last, place) for last in range(lowest, widest + 1)]
        found.sort()
        return [(-last, self.capacities[place]) for _, last, place in found]

    def _lowest_end(self, capacity: ClusterCapacity, ranges_left: int) -> int:
        """Return the smallest end of a range at `capacity` from which `ranges_left - 1` more reach the last stage."""
        key, count = (capacity.name, ranges_left), self.requirement.num_stages
        if key not in self._range_ends:
            starts = self._earliest_starts(ranges_left - 1) if ranges_left > 1 else {}
            near = self._neighbours[capacity.name] if ranges_left > 1 else ()
            self._range_ends[key] = min((starts.get(other.name, count) for other in near), default=count)
        return self._range_ends[key]

    def _with_range(self, used: UsedStages, taken: StageRange) -> UsedStages:
        more = self.requirement.count_by_size(taken.first, taken.last)
        had = used.get(taken.cluster)
        both = more if had is None else tuple(a + b for a, b in zip(had, more, strict=True))
        return {**used, taken.cluster: both}


def _first_stage_reaching(max_range_ends: Sequence[int], end: int) -> int | None:
    """Return the first stage from which a non-empty range reaches `end` (`max_range_ends` is non-decreasing)."""
    return next((first for first, last in enumerate(max_range_ends) if last >= end and last > first), None)
