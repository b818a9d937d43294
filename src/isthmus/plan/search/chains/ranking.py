"""`Ranking`: chains by what they promise, whole families of them as one until they come up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from isthmus.plan.search.chains.chain_shape import Shape

Worth = Callable[[int, float, float], float]
"""What is to come first, by replicas, seconds of the first micro-batch and of each further one.

It does not fall with the seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """A chain, `made` for a schedule when it is asked for, and the seconds that no split of it can beat."""

    dp: int
    first_s: float
    pace_s: float
    made: Callable[[str], Shape]


@dataclass(slots=True)
class Family:
    """So many chains of `dp` replicas, and the seconds that none of them can beat; `open` parts them."""

    dp: int
    first_s: float
    pace_s: float
    count: int
    open: Callable[[], Sequence[Family | Bounded]]
    alone: Callable[[], float] | None = None
    _parts: Sequence[Family | Bounded] | None = None
    _end_s: float | None = None

    @property
    def end_s(self) -> float:
        """Seconds before which none of them ends the batch alone, weighed closer than the two apart."""
        if self._end_s is None:
            self._end_s = self.alone() if self.alone else 0.0
        return self._end_s

    @property
    def parts(self) -> Sequence[Family | Bounded]:
        """Smaller families, or single chains."""
        if self._parts is None:
            self._parts = self.open()
        return self._parts

    @property
    def chains(self) -> Iterator[Bounded]:
        """All of its chains."""
        for one in self.parts:
            if isinstance(one, Family):
                yield from one.chains
            else:
                yield one


class Ranking(Iterator[tuple[float, Bounded]]):
    """Chains with their worth below a limit, the least first. `left` says how many were not reached, at most.

    `alone`: their worth is the time in which they end the batch alone, and what families say of it counts.
    """

    def __init__(
        self, families: Sequence[Family], worth: Worth, limit: float = math.inf, *, alone: bool = False
    ) -> None:
        self._worth, self._limit, self._alone, self._number = worth, limit, alone, 0
        entries = (self._entry(one, -math.inf) for one in families)
        self._heap = [one for one in entries if one[0] < limit]
        heapify(self._heap)
        self.left = sum(one.count for one in families)

    def _entry(self, one: Family | Bounded, least: float) -> tuple[float, bool, int, Family | Bounded]:
        """Return a family or chain as it stands in the heap: of equals chains, then families opened last."""
        family = isinstance(one, Family)
        self._number += 1
        number = -self._number if family else self._number
        return max(least, self._worth(one.dp, one.first_s, one.pace_s)), family, number, one

    def __next__(self) -> tuple[float, Bounded]:
        """Return the next chain."""
        while self._heap:
            value, _, _, one = heappop(self._heap)
            if isinstance(one, Bounded):
                self.left -= 1
                return value, one
            if self._alone and one.end_s > value:
                self._push(one, one.end_s)
                continue
            closer = one.end_s - one.first_s if self._alone and one.end_s else -math.inf
            for part in one.parts:
                self._push(part, closer + part.first_s)
        raise StopIteration

    def _push(self, one: Family | Bounded, least: float) -> None:
        entry = self._entry(one, least)
        if entry[0] < self._limit:
            heappush(self._heap, entry)
