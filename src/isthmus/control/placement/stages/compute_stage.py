"""`ranges_over`: the compute stage. Contiguous ranges of pipeline stages for clusters, fewest ranges first.

Cross-domain pooling report 4.2.3 (3): the widest range that some cluster holds first, narrowed from the end.
The report neither deducts what an earlier range took nor goes back. Here a range is deducted (a cluster may
have several), and where a choice leads nowhere the next is tried. What cannot end is cut off by two bounds:
the ranges left cannot reach the end even from empty clusters, or the clusters they would have to be at have
too few places for the stages left. The storage and the network stage are asked for every range that is laid,
so that nothing is built on one that they would refuse. Exact unless the work runs out, which is told.
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
"""Stages by size that ranges already laid have at a cluster."""


@dataclass
class Work:
    """How many looks at a cluster one search may take; `over` turns true when it wanted more."""

    left: int
    over: bool = False

    def spend(self, looks: int) -> bool:
        """Return whether there is work left for so many looks."""
        self.left -= looks
        self.over = self.over or self.left < 0
        return not self.over


@dataclass
class ComputeStage:
    """One search over `rooms`, tried in the given order among equally wide ranges.

    `network` says which clusters may follow which, `storage` whether they store what their stages need.
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
        """The rooms that may follow each, as far as the link between them is concerned."""
        return {
            room.name: [other for other in self.rooms if self.network.may_join(room.name, other.name)]
            for room in self.rooms
        }

    def _starts_with(self, number: int) -> dict[str, int]:
        """Return by room the first stage from which `number` ranges, its own first, could reach the end.

        As though every range had empty clusters: a bound. Rooms from which none could are not named.
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
        """Yield every admitted way to lay all stages as exactly `number` ranges, widest ranges first."""
        if number <= self.requirement.num_stages:
            yield from self._lay((), {}, 0, number)

    def _lay(self, laid: Ranges, used: Used, first: int, left: int) -> Iterator[Ranges]:
        if not self.work.spend(len(self.rooms)) or not self._enough(laid, used, first, left):
            return
        count = self.requirement.num_stages
        for last, room in self._choices(laid, used, first, left):
            grown = (*laid, Range(first, last, room.name))
            if not self.work.spend(1):
                return
            if not self.storage.stores(grown):
                continue
            if last == count:
                yield grown
                continue
            yield from self._lay(grown, self._deducted(used, grown[-1]), last, left - 1)

    def _enough(self, laid: Ranges, used: Used, first: int, left: int) -> bool:
        """Tell whether the `left` roomiest clusters in reach have places for the stages from `first` on."""
        wanted = self.requirement.counts(first, self.requirement.num_stages)
        near = self._within(laid[-1].cluster, left) if laid else self.rooms
        bounds = [room.at_most(wanted, used.get(room.name)) for room in near]
        best = sum(bounds) if left >= len(bounds) else sum(heapq.nlargest(left, bounds))
        return best >= sum(wanted)

    def _within(self, name: str, hops: int) -> list[Room]:
        """Return the rooms that a path of at most `hops` links from a cluster reaches."""
        if (name, hops) not in self._balls:
            ball = {room.name: room for room in self._nearby[name]}
            for room in self._within(name, hops - 1) if hops > 1 else ():
                ball.update({other.name: other for other in (room, *self._nearby[room.name])})
            self._balls[name, hops] = list(ball.values())
        return self._balls[name, hops]

    def _choices(self, laid: Ranges, used: Used, first: int, left: int) -> list[tuple[int, Room]]:
        """Return (end, room) of the next range: every room at its widest, then one narrower, and so on."""
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
        """Return the least end of a range at `room` from which `left - 1` more could reach the end."""
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
    """Return the first stage from which a range that is not empty reaches `end` (`reach` never falls)."""
    return next((first for first, last in enumerate(reach) if last >= end and last > first), None)
