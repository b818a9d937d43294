"""`PipelineRanking`: pipelines in the order of their lower bounds, whole groups as one entry until they come up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape

RankKey = Callable[[int, float, float], float]
"""Rank by (replicas, seconds of the first micro-batch, seconds of each further one); lowest first.

It must not decrease as the seconds grow.
"""


@dataclass(frozen=True, slots=True, eq=False)
class BoundedPipeline:
    """A pipeline with lower bounds on its times; `make(schedule)` creates it."""

    dp: int
    first_s: float
    interval_s: float
    make: Callable[[str], PipelineShape]
    # Stages at each slot of the replica group, with their cost tables.
    cost_tables: tuple[StageCostTable, ...] = ()
    stage_counts: tuple[int, ...] = ()


@dataclass(slots=True)
class PipelineGroup:
    """A group of pipelines of `dp` replicas, with lower bounds on their times."""

    dp: int
    first_s: float
    interval_s: float
    # Split the group into smaller groups or single pipelines.
    expand: Callable[[], Sequence[PipelineGroup | BoundedPipeline]]
    # Tighter bound on the end of the batch with one pipeline alone.
    end_bound_s: Callable[[], float] | None = None
    # Whether a member ends later than that by as much as its first micro-batch takes longer.
    is_one_pipeline: bool = False
    # Cost tables of the slots, and the number of stages at each; no numbers where the members differ.
    cost_tables: tuple[StageCostTable, ...] = ()
    stage_counts: tuple[int, ...] = ()
    _members: Sequence[PipelineGroup | BoundedPipeline] | None = None
    _end_s: float | None = None

    @property
    def end_s(self) -> float:
        """Lower bound on the end of the batch with one pipeline alone; 0 without a tighter bound."""
        if self._end_s is None:
            self._end_s = self.end_bound_s() if self.end_bound_s else 0.0
        return self._end_s

    @property
    def members(self) -> Sequence[PipelineGroup | BoundedPipeline]:
        """Smaller groups, or single pipelines."""
        if self._members is None:
            self._members = self.expand()
        return self._members

    @property
    def pipelines(self) -> Iterator[BoundedPipeline]:
        """All pipelines of the group."""
        for one in self.members:
            if isinstance(one, PipelineGroup):
                yield from one.pipelines
            else:
                yield one


class PipelineRanking(Iterator[tuple[float, BoundedPipeline]]):
    """An iterator over (rank, pipeline) below a limit, lowest first.

    `count_all` returns an upper bound on the pipelines. `by_end`: the rank is the time to finish the batch with one
    pipeline, so the groups' tighter bounds apply.
    """

    def __init__(
        self,
        groups: Sequence[PipelineGroup],
        rank_key: RankKey,
        count_all: Callable[[], int],
        limit: float = math.inf,
        *,
        by_end: bool = False,
    ) -> None:
        self._rank_key, self._limit, self._by_end, self._serial_number = rank_key, limit, by_end, 0
        self._count_all, self._num_reached = count_all, 0
        # Groups with a tighter bound enter with it, the first one last: at equal rank it comes up first.
        entries = (
            [self._heap_entry(one, one.end_s) for one in reversed(groups)]
            if by_end
            else [self._heap_entry(one, -math.inf) for one in groups]
        )
        self._heap = [one for one in entries if one[0] < limit]
        heapify(self._heap)

    @property
    def num_left(self) -> int:
        """Upper bound on the pipelines not reached."""
        return self._count_all() - self._num_reached

    def _heap_entry(
        self, one: PipelineGroup | BoundedPipeline, least: float
    ) -> tuple[float, bool, int, PipelineGroup | BoundedPipeline]:
        """Return a heap entry; at equal rank pipelines come first, then the group opened last."""
        group = isinstance(one, PipelineGroup)
        self._serial_number += 1
        number = -self._serial_number if group else self._serial_number
        return max(least, self._rank_key(one.dp, one.first_s, one.interval_s)), group, number, one

    def __next__(self) -> tuple[float, BoundedPipeline]:
        """Return the next pipeline."""
        rank, one = self.open_until(math.inf)
        if one is None:
            raise StopIteration
        heappop(self._heap)
        self._num_reached += 1
        return rank, one

    def open_until(self, rank: float) -> tuple[float, BoundedPipeline | None]:
        """Open groups of at most a rank; return the next pipeline, or a lower bound on its rank and None."""
        heap = self._heap
        while heap:
            value, _, _, one = heap[0]
            if isinstance(one, BoundedPipeline):
                return value, one
            if value > rank:
                return value, None
            heappop(heap)
            if self._by_end and one.end_s > value:
                self._push(one, one.end_s)
                continue
            closer = one.end_s - one.first_s if self._by_end and one.is_one_pipeline else -math.inf
            for part in one.members:
                self._push(part, max(value, closer + part.first_s))
        return math.inf, None

    def _push(self, one: PipelineGroup | BoundedPipeline, least: float) -> None:
        entry = self._heap_entry(one, least)
        if entry[0] < self._limit:
            heappush(self._heap, entry)
