"""`StageCounts`: candidate numbers of replicas and of stages per slot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus.plan.search.costs.search_limits import SearchLimits

MAX_EXHAUSTIVE = 96
"""Up to this many combinations of stages per slot are all tried."""

DENSE_REPLICAS = 16
"""Up to this every number of replicas is tried, beyond it steps of `REPLICA_STEP`."""

REPLICA_STEP = 1.1
COARSE_STEP = 1.5

MAX_RETURN_ALL = 3
"""Up to this many stages at a slot, any number of them may come last in a pipeline that returns to it."""


MAX_DIVISORS = 8
"""Most numbers of replicas to try where they must divide the micro-batches, the largest first."""


class StageCountGroup(NamedTuple):
    """Pipelines of `dp` replicas."""

    dp: int
    # Most stages per slot over `stage_counts`.
    max_stages: tuple[int, ...]
    # Candidate numbers of stages per slot.
    stage_counts: tuple[tuple[int, ...], ...]


@dataclass
class StageCounts:
    """Candidate counts for a model of `num_layers` layers."""

    limits: SearchLimits
    num_layers: int
    # Also try fewer replicas than fit: cheaper plans may win.
    minimise_cost: bool = False
    # Whether any count was skipped.
    thinned: bool = False
    _cache: dict[tuple[object, ...], tuple[StageCountGroup, ...]] = field(default_factory=dict)

    def groups_for(self, capacities: Sequence[int], micro_batches: int, coarse: bool) -> tuple[StageCountGroup, ...]:
        """Return the stage counts that fit `capacities` stages per slot, grouped by number of replicas."""
        key = (tuple(capacities), micro_batches, coarse)
        if key not in self._cache:
            found: dict[int, dict[tuple[int, ...], None]] = {}
            for most, stages in self._enumerate(capacities, coarse):
                pp = sum(stages)
                if pp <= self.num_layers and self.limits.pp in (None, pp):
                    for dp in self.replica_counts(most, micro_batches):
                        found.setdefault(dp, {})[stages] = None
            self._cache[key] = tuple(
                StageCountGroup(dp, tuple(map(max, zip(*some, strict=True))), tuple(some)) for dp, some in found.items()
            )
        return self._cache[key]

    def replica_counts(self, capacity: int, micro_batches: int) -> tuple[int, ...]:
        """Return the numbers of replicas to try where `capacity` fit, for `micro_batches` in all."""
        most = min(capacity, micro_batches)
        if self.limits.dp:
            return (self.limits.dp,) if self.limits.dp <= most else ()
        if self.limits.framework:
            return tuple(dp for dp in range(most, 0, -1) if micro_batches % dp == 0)[:MAX_DIVISORS]
        fewer = self.minimise_cost or self.limits.max_chips or self.limits.executable
        return _halved_counts(most) if fewer else (most,)

    def return_counts(self, num_stages: int) -> tuple[int, ...]:
        """Return how many of a slot's `num_stages` may come last in a pipeline that returns to it."""
        if num_stages <= MAX_RETURN_ALL:
            return tuple(range(1, num_stages))
        self.thinned = True
        return (1,)

    def _enumerate(self, capacities: Sequence[int], coarse: bool) -> Iterator[tuple[int, tuple[int, ...]]]:
        most = [min(one, self.num_layers) for one in capacities]
        if min(most) < 1:
            return
        if self.limits.pp:
            for stages in self._stage_splits(self.limits.pp, most):
                yield min(r // s for r, s in zip(capacities, stages, strict=True)), stages
            return
        if math.prod(most) <= (400 if self.limits.executable else MAX_EXHAUSTIVE):
            for stages in itertools.product(*(range(1, one + 1) for one in most)):
                yield min(r // s for r, s in zip(capacities, stages, strict=True)), stages
            return
        self.thinned = True
        numbers = sorted({r // s for r in capacities for s in range(1, min(r, self.num_layers) + 1)})
        for dp in reversed(_thin_counts([dp for dp in numbers if dp <= min(capacities)], coarse)):
            fillings = self._filling_counts(capacities, dp)
            yield from ((dp, stages) for stages in itertools.islice(fillings, 1 if coarse else None))

    def _stage_splits(self, pp: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield ways to distribute `pp` stages over slots, at least one each; sampled evenly where many."""
        count = math.comb(pp - 1, len(most) - 1)
        step = max(1, count // MAX_EXHAUSTIVE)
        self.thinned = self.thinned or step > 1
        for ends in itertools.islice(itertools.combinations(range(1, pp), len(most) - 1), None, None, step):
            stages = tuple(b - a for a, b in itertools.pairwise((0, *ends, pp)))
            if all(one <= limit for one, limit in zip(stages, most, strict=True)):
                yield stages

    def _filling_counts(self, capacities: Sequence[int], dp: int) -> Iterator[tuple[int, ...]]:
        """Yield numbers of stages with which `dp` replicas fill the slots: full, one less, half."""
        full = [min(self.num_layers, one // dp) for one in capacities]
        if sum(full) > self.num_layers:
            for part in (1.0, 0.5, 0.25, 0.125):
                yield tuple(max(1, math.floor(one * part * self.num_layers / sum(full))) for one in full)
            return
        choices = [sorted({one, max(1, one - 1), (one + 1) // 2}, reverse=True) for one in full]
        if len(capacities) <= 2:
            yield from itertools.product(*choices)
            return
        yield tuple(full)
        yield tuple(max(1, one - 1) for one in full)
        yield tuple((one + 1) // 2 for one in full)


def _halved_counts(maximum: int) -> tuple[int, ...]:
    """Return `maximum` and the powers of two below it, descending."""
    return tuple(dict.fromkeys([maximum, *(1 << i for i in reversed(range(maximum.bit_length())) if 1 << i < maximum)]))


def _thin_counts(counts: Sequence[int], coarse: bool) -> list[int]:
    """Thin ascending numbers: keep the small ones, larger ones at least a step apart, and the last."""
    found: list[int] = []
    for number in counts:
        dense = number <= (2 if coarse else DENSE_REPLICAS)
        if not found or dense or number >= found[-1] * (COARSE_STEP if coarse else REPLICA_STEP):
            found.append(number)
    if counts and found[-1] != counts[-1]:
        found.append(counts[-1])
    return found
