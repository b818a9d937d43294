"""`Numbers`: how many replicas of a chain there may be, with how many stages at each of its spots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus.plan.search.costs.limits import Limits

WHOLE = 96
"""Numbers of stages per spot are all tried where there are at most so many combinations."""

DENSE_REPLICAS = 16
"""Numbers of replicas are all tried up to this, beyond it in steps of `REPLICA_STEP`."""

REPLICA_STEP = 1.1
COARSE_STEP = 1.5

FEW_BACK = 3
"""Of at most so many stages at a spot any number is put at the end of a chain that returns to it."""


class Kin(NamedTuple):
    """Chains of `dp` replicas: their numbers of stages per spot, and the most of them at each spot."""

    dp: int
    most: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]


@dataclass
class Numbers:
    """Numbers for a model of so many layers. `thinned` turns true once some were left out.

    `thrifty` tries fewer replicas than there is room for, too.
    """

    limits: Limits
    layers: int
    thrifty: bool = False
    thinned: bool = False
    _known: dict[tuple[object, ...], tuple[Kin, ...]] = field(default_factory=dict)

    def of(self, room: Sequence[int], micro_batches: int, coarse: bool) -> tuple[Kin, ...]:
        """Return the numbers of stages per spot that fit `room` places per spot, by numbers of replicas."""
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
        """Return the numbers of replicas to try where at most `room` fit, for so many micro-batches."""
        most = min(room, micro_batches)
        if self.limits.dp:
            return (self.limits.dp,) if self.limits.dp <= most else ()
        fewer = self.thrifty or self.limits.max_chips or self.limits.executable
        return _fewer(most) if fewer else (most,)

    def back(self, stages: int) -> tuple[int, ...]:
        """Return how many of a spot's stages to put at the end of a chain that returns to it."""
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
        """Yield the ways to deal `pp` stages to spots of at most so many, each some: evenly few of many."""
        count = math.comb(pp - 1, len(most) - 1)
        step = max(1, count // WHOLE)
        self.thinned = self.thinned or step > 1
        for ends in itertools.islice(itertools.combinations(range(1, pp), len(most) - 1), None, None, step):
            stages = tuple(b - a for a, b in itertools.pairwise((0, *ends, pp)))
            if all(one <= limit for one, limit in zip(stages, most, strict=True)):
                yield stages

    def _fillings(self, room: Sequence[int], dp: int) -> Iterator[tuple[int, ...]]:
        """Yield numbers of stages with which `dp` replicas fill the spots: whole, one fewer, half."""
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
    return tuple(
        dict.fromkeys([most, *(1 << i for i in reversed(range(most.bit_length())) if 1 << i < most)])
    )


def _spread(numbers: Sequence[int], coarse: bool) -> list[int]:
    """Return the small of rising numbers, and of the large ones those at least a step apart, the last too."""
    found: list[int] = []
    for number in numbers:
        dense = number <= (2 if coarse else DENSE_REPLICAS)
        if not found or dense or number >= found[-1] * (COARSE_STEP if coarse else REPLICA_STEP):
            found.append(number)
    if numbers and found[-1] != numbers[-1]:
        found.append(numbers[-1])
    return found
