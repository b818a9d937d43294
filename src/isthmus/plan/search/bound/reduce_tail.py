"""`tail_of`: the least that follows the last backward pass of several islands: the ring between clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.costs.routes import Ways
from isthmus.plan.search.costs.slots import Spot, flat


@dataclass(frozen=True)
class Tail:
    """Seconds of the ring of gradients: by parameter of a stage, and beside."""

    parameter_s: float = 0.0
    fixed_s: float = 0.0


NO_TAIL = Tail()
"""Nothing follows: one island, or islands that may reduce each layer inside a cluster."""


def tail_of(parts: Sequence[Sequence[Spot]], ways: Ways, gradient_bytes: float) -> Tail:
    """Return the tail of islands, `gradient_bytes` per parameter; infinite where no ring joins them.

    The ring of a layer visits one cluster of each island, a different one for each where no two islands share
    a cluster. Islands inside clusters have one ring for all layers: all bytes pass its slowest wire, which is
    at most the fastest there is. Where a chain crosses, the next cluster may differ by layer, and the bytes
    of a stage may leave over all wires of its cluster.
    """
    sets = [frozenset(spot.cluster for spot in flat(part)) for part in parts]
    pairs = [not a & b for a, b in itertools.combinations(sets, 2)]
    members = len(sets) if all(pairs) else 2 if any(pairs) else 1
    if members < 2:
        return NO_TAIL
    names = sorted(frozenset.union(*sets))
    joined = {(a, b): way for a in names for b in names if (way := ways.way(a, b))}
    if not joined:
        return Tail(fixed_s=math.inf)
    rate = max(way.bytes_per_s for way in joined.values())
    if not all(pairs) or any(len(one) > 1 for one in sets):
        rate = max(sum(way.bytes_per_s for ends, way in joined.items() if ends[0] == name) for name in names)
    steps = 2 * (members - 1)
    unsure = not all(way.steady for way in joined.values())  # a message may come early, once
    delay_s = (steps - unsure) * min(way.delay_s for way in joined.values())
    return Tail(steps / members * gradient_bytes / rate, delay_s)
