"""`ComputeStage`: splits of a pipeline into contiguous ranges of stages, one cluster per range.

Cross-domain pooling report 4.2.3 (3): the longest range that a cluster holds is tried first, then shortened
from the end. Unlike the report, the search deducts the ranges placed so far (a cluster may have several) and
backtracks. Two bounds prune it: the remaining ranges cannot reach the last stage even on empty clusters, or
the reachable clusters have too few slots for the remaining stages. The storage and network filters check
every range as it is placed. Exact unless the lookup budget runs out (`Work.over`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.control.placement.resources.requirement import Range, Requirement
from isthmus.control.placement.stages.cluster_room import Room
from isthmus.control.placement.stages.network_stage import NetworkStage
from isthmus.control.placement.stages.storage_stage import StorageStage

Ranges = tuple[Range, ...]
Used = dict[str, tuple[int, ...]]
"""Stages by size that are already placed at each cluster."""


@dataclass
class Work:
    """The cluster lookups left to one search; `over` becomes true when they are exceeded."""

    left: int
    over: bool = False

    def spend(self, looks: int) -> bool:
        """Deduct lookups; return whether the budget sufficed."""
        self.left -= looks
        self.over = self.over or self.left < 0
        return not self.over


@dataclass
class ComputeStage:
    """One search over `rooms`; among ranges of equal length their order decides.

    `network` decides which clusters may be neighbours, `storage` which can store the data of their stages.
    """

    requirement: Requirement
    rooms: Sequence[Room]
    network: NetworkStage
    storage: StorageStage
    work: Work
    _starts: list[dict[str, int]] = field(default_factory=list)
    _ends: dict[tuple[str, int], int] = field(default_factory=dict)
    _balls: dict[tuple[str, int], list[Room]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rooms = [room for room in self.rooms if any(room.most)]
        self._place = {room.name: place for place, room in enumerate(self.rooms)}

    @cached_property
    def _nearby(self) -> dict[str, list[Room]]:
        """For each cluster, the clusters with a sufficient link to it."""
        return {
            room.name: [other for other in self.rooms if self.network.may_join(room.name, other.name)]
            for room in self.rooms
        }

    def _starts_with(self, number: int) -> dict[str, int]:
        """Return for each cluster the earliest stage from which `number` ranges could reach the last stage.

        The first of these ranges is at that cluster. A bound, since it assumes empty clusters; clusters from
        which the last stage is unreachable are left out.
        """
        count = self.requirement.num_stages
        while len(self._starts) < number:
            found = {}
            for room in self.rooms:
                left = len(self._starts) + 1
                end, is_last = self._lowest(room, left), left == 1
                start = _first_with(room.reach, end)
                if start is not None and (room.reads_data if is_last else end < count):
                    found[room.name] = start
            self._starts.append(found)
        return self._starts[number - 1]

    def ranges_over(self, number: int) -> Iterator[Ranges]:
        """Yield every admitted split of all stages into exactly `number` ranges, longest ranges first."""
        if number <= self.requirement.num_stages:
            yield from self._lay((), {}, 0, number)

    def _lay(self, laid: Ranges, used: Used, first: int, left: int) -> Iterator[Ranges]:
        """Yield the splits that extend `laid` by `left` ranges from stage `first` on."""
        if not self.work.spend(len(self.rooms)) or not self._enough(laid, used, first, left):
            return
        count = self.requirement.num_stages
        for last, room in self._choices(laid, used, first, left):
            extended = (*laid, Range(first, last, room.name))
            if not self.work.spend(1):
                return
            if not self.storage.stores(extended):
                continue
            if last == count:
                yield extended
                continue
            yield from self._lay(extended, self._deducted(used, extended[-1]), last, left - 1)

    def _enough(self, laid: Ranges, used: Used, first: int, left: int) -> bool:
        """Return whether the `left` largest reachable clusters have slots for the stages from `first` on."""
        wanted = self.requirement.counts(first, self.requirement.num_stages)
        near = self._within(laid[-1].cluster, left) if laid else self.rooms
        bounds = [room.at_most(wanted, used.get(room.name)) for room in near]
        best = sum(bounds) if left >= len(bounds) else sum(heapq.nlargest(left, bounds))
        return best >= sum(wanted)

    def _within(self, name: str, hops: int) -> list[Room]:
        """Return the clusters reachable from a cluster over at most `hops` links."""
        if (name, hops) not in self._balls:
            reachable = {room.name: room for room in self._nearby[name]}
            for room in self._within(name, hops - 1) if hops > 1 else ():
                reachable.update({other.name: other for other in (room, *self._nearby[room.name])})
            self._balls[name, hops] = list(reachable.values())
        return self._balls[name, hops]

    def _choices(self, laid: Ranges, used: Used, first: int, left: int) -> list[tuple[int, Room]]:
        """Return (end, cluster) of the next range: every cluster's longest range, then one stage less."""
        count, starts = self.requirement.num_stages, self._starts_with(left)
        highest, found = count - left + 1, []
        for room in self._nearby[laid[-1].cluster] if laid else self.rooms:
            if starts.get(room.name, count) > first or (first == 0 and not room.reads_data):
                continue
            taken = used.get(room.name)
            reach = room.reach[first] if taken is None else room.reach_beside(first, taken)
            lowest, widest = max(first + 1, self._lowest(room, left)), min(reach, highest)
            if widest < lowest or (laid and not self.network.joins(laid, room.name)):
                continue
            place = self._place[room.name]
            found += [(widest - last, -last, place) for last in range(lowest, widest + 1)]
        found.sort()
        return [(-last, self.rooms[place]) for _, last, place in found]

    def _lowest(self, room: Room, left: int) -> int:
        """Return the smallest end of a range at `room` from which `left - 1` more reach the last stage."""
        key, count = (room.name, left), self.requirement.num_stages
        if key not in self._ends:
            starts = self._starts_with(left - 1) if left > 1 else {}
            near = self._nearby[room.name] if left > 1 else ()
            self._ends[key] = min((starts.get(other.name, count) for other in near), default=count)
        return self._ends[key]

    def _deducted(self, used: Used, taken: Range) -> Used:
        more = self.requirement.counts(taken.first, taken.last)
        had = used.get(taken.cluster)
        both = more if had is None else tuple(a + b for a, b in zip(had, more, strict=True))
        return {**used, taken.cluster: both}


def _first_with(reach: Sequence[int], end: int) -> int | None:
    """Return the first stage from which a non-empty range reaches `end` (`reach` is non-decreasing)."""
    return next((first for first, last in enumerate(reach) if last >= end and last > first), None)
