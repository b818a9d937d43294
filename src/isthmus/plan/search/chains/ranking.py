"""`Ranking`: pipelines in the order of their lower bounds, whole groups as one entry until they come up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from isthmus.plan.search.chains.chain_shape import Shape

Worth = Callable[[int, float, float], float]
"""Rank by (replicas, seconds of the first micro-batch, seconds of each further one); lowest first.

It must not decrease as the seconds grow.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """A pipeline with lower bounds on its times; `made(schedule)` creates it."""

    dp: int
    first_s: float
    pace_s: float
    made: Callable[[str], Shape]


@dataclass(slots=True)
class Family:
    """A group of `count` pipelines of `dp` replicas, with lower bounds on their times."""

    dp: int
    first_s: float
    pace_s: float
    count: int
    # Split the group into smaller groups or single pipelines.
    open: Callable[[], Sequence[Family | Bounded]]
    # Tighter bound on the end of the batch with one pipeline alone.
    alone: Callable[[], float] | None = None
    _parts: Sequence[Family | Bounded] | None = None
    _end_s: float | None = None

    @property
    def end_s(self) -> float:
        """Lower bound on the end of the batch with one pipeline alone; 0 without a tighter bound."""
        if self._end_s is None:
            self._end_s = self.alone() if self.alone else 0.0
        return self._end_s

    @property
    def parts(self) -> Sequence[Family | Bounded]:
        """Smaller groups, or single pipelines."""
        if self._parts is None:
            self._parts = self.open()
        return self._parts

    @property
    def chains(self) -> Iterator[Bounded]:
        """All pipelines of the group."""
        for one in self.parts:
            if isinstance(one, Family):
                yield from one.chains
            else:
                yield one


class Ranking(Iterator[tuple[float, Bounded]]):
    """An iterator over (rank, pipeline) below a limit, lowest first.

    `left` is an upper bound on the pipelines not reached. `alone`: the rank is the time to finish the batch
    with one pipeline, so the groups' tighter bounds apply.
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
        """Return a heap entry; at equal rank pipelines come first, then the group opened last."""
        group = isinstance(one, Family)
        self._number += 1
        number = -self._number if group else self._number
        return max(least, self._worth(one.dp, one.first_s, one.pace_s)), group, number, one

    def __next__(self) -> tuple[float, Bounded]:
        """Return the next pipeline."""
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
