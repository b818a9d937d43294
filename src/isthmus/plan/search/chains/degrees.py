"""`Numbers`: candidate numbers of replicas and of stages per slot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus.plan.search.costs.limits import Limits

WHOLE = 96
"""Up to this many combinations of stages per slot are all tried."""

DENSE_REPLICAS = 16
"""Up to this every number of replicas is tried, beyond it steps of `REPLICA_STEP`."""

REPLICA_STEP = 1.1
COARSE_STEP = 1.5

FEW_BACK = 3
"""Up to this many stages at a slot, any number of them may come last in a pipeline that returns to it."""


class Kin(NamedTuple):
    """Pipelines of `dp` replicas."""

    dp: int
    # Most stages per slot over `stages`.
    most: tuple[int, ...]
    # Candidate numbers of stages per slot.
    stages: tuple[tuple[int, ...], ...]


@dataclass
class Numbers:
    """Candidate counts for a model of `layers` layers."""

    limits: Limits
    layers: int
    # Also try fewer replicas than fit: cheaper plans may win.
    thrifty: bool = False
    # Whether any count was skipped.
    thinned: bool = False
    _known: dict[tuple[object, ...], tuple[Kin, ...]] = field(default_factory=dict)

    def of(self, room: Sequence[int], micro_batches: int, coarse: bool) -> tuple[Kin, ...]:
        """Return the stage counts that fit `room` stages per slot, grouped by number of replicas."""
        key = (tuple(room), micro_batches, coarse)
        if key not in self._known:
            found: dict[int, dict[tuple[int, ...], None]] = {}
            for most, stages in self._all(room, coarse):
                pp = sum(stages)
                if pp <= self.layers and self.limits.pp in (None, pp):
                    for dp in self.replicas(most, micro_batches):
                        found.setdefault(dp, {})[stages] = None
            self._known[key] = tuple(
                Kin(dp, tuple(map(max, zip(*some, strict=True))), tuple(some)) for dp, some in found.items()
            )
        return self._known[key]

    def replicas(self, room: int, micro_batches: int) -> tuple[int, ...]:
        """Return the numbers of replicas to try where `room` fit, for `micro_batches` in all."""
        most = min(room, micro_batches)
        if self.limits.dp:
            return (self.limits.dp,) if self.limits.dp <= most else ()
        fewer = self.thrifty or self.limits.max_chips or self.limits.executable
        return _fewer(most) if fewer else (most,)

    def back(self, stages: int) -> tuple[int, ...]:
        """Return how many of a slot's `stages` may come last in a pipeline that returns to it."""
        if stages <= FEW_BACK:
            return tuple(range(1, stages))
        self.thinned = True
        return (1,)

    def _all(self, room: Sequence[int], coarse: bool) -> Iterator[tuple[int, tuple[int, ...]]]:
        most = [min(one, self.layers) for one in room]
        if min(most) < 1:
            return
        if self.limits.pp:
            for stages in self._splits(self.limits.pp, most):
                yield min(r // s for r, s in zip(room, stages, strict=True)), stages
            return
        if math.prod(most) <= (400 if self.limits.executable else WHOLE):
            for stages in itertools.product(*(range(1, one + 1) for one in most)):
                yield min(r // s for r, s in zip(room, stages, strict=True)), stages
            return
        self.thinned = True
        numbers = sorted({r // s for r in room for s in range(1, min(r, self.layers) + 1)})
        for dp in reversed(_spread([dp for dp in numbers if dp <= min(room)], coarse)):
            fillings = self._fillings(room, dp)
            yield from ((dp, stages) for stages in itertools.islice(fillings, 1 if coarse else None))

    def _splits(self, pp: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield ways to distribute `pp` stages over slots, at least one each; sampled evenly where many."""
        count = math.comb(pp - 1, len(most) - 1)
        step = max(1, count // WHOLE)
        self.thinned = self.thinned or step > 1
        for ends in itertools.islice(itertools.combinations(range(1, pp), len(most) - 1), None, None, step):
            stages = tuple(b - a for a, b in itertools.pairwise((0, *ends, pp)))
            if all(one <= limit for one, limit in zip(stages, most, strict=True)):
                yield stages

    def _fillings(self, room: Sequence[int], dp: int) -> Iterator[tuple[int, ...]]:
        """Yield numbers of stages with which `dp` replicas fill the slots: full, one less, half."""
        full = [min(self.layers, one // dp) for one in room]
        if sum(full) > self.layers:
            for part in (1.0, 0.5, 0.25, 0.125):
                yield tuple(max(1, math.floor(one * part * self.layers / sum(full))) for one in full)
            return
        choices = [sorted({one, max(1, one - 1), (one + 1) // 2}, reverse=True) for one in full]
        if len(room) <= 2:
            yield from itertools.product(*choices)
            return
        yield tuple(full)
        yield tuple(max(1, one - 1) for one in full)
        yield tuple((one + 1) // 2 for one in full)


def _fewer(most: int) -> tuple[int, ...]:
    """Return `most` and the powers of two below it, descending."""
    return tuple(
        dict.fromkeys([most, *(1 << i for i in reversed(range(most.bit_length())) if 1 << i < most)])
    )


def _spread(numbers: Sequence[int], coarse: bool) -> list[int]:
    """Thin ascending numbers: keep the small ones, larger ones at least a step apart, and the last."""
    found: list[int] = []
    for number in numbers:
        dense = number <= (2 if coarse else DENSE_REPLICAS)
        if not found or dense or number >= found[-1] * (COARSE_STEP if coarse else REPLICA_STEP):
            found.append(number)
    if numbers and found[-1] != numbers[-1]:
        found.append(numbers[-1])
    return found
