"""`island_options`: the chains that an island may be, bounded but not yet cut."""

from __future__ import annotations

import math
from collections.abc import Iterator

from isthmus.plan.search.compose import Option, Options
from isthmus.plan.search.found import Found
from isthmus.plan.search.islands import Island
from isthmus.plan.search.space import MANY_CHIPS, Space

OPEN, ALL = 32, 1 << 30
"""Options of an island that are compared at once: with those of others, and where it trains alone."""


def island_options(
    space: Space, island: Island, size: int, schedule: str, total: int, found: Found, *, alone: bool
) -> Options:
    """Return the options of an island for `total` micro-batches of `size`.

    One that trains `alone` has only those that can beat what was found by now.
    """
    several = len(island) > 1
    limit_s = found.limit_s if alone and several else math.inf
    coarse = not alone and several and sum(spot.chips for spot in island) > MANY_CHIPS

    def make() -> Iterator[Option]:
        for shape in space.shapes(island, size, schedule, total, limit_s, coarse):
            yield Option(shape, shape.bound)

    if found.best is not None:
        scale_s = found.best.estimate_s
    else:
        scale_s = min(
            (one.cost.first_s + total / one.shape.dp * one.cost.pace_s for one in make()), default=0.0
        )
    options = Options(make, scale_s, ALL if alone else OPEN)
    space.thinned = space.thinned or options.more
    return options
