"""`crossing_of`: the least that a chain over several clusters spends on messages, in whatever order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.costs.routes import Ways


@dataclass(frozen=True)
class Crossing:
    """Seconds that a micro-batch is between clusters, both ways, and that its message occupies a wire."""

    hops_s: float = 0.0
    wire_s: float = 0.0


def crossing_of(clusters: Sequence[str], ways: Ways, num_bytes: float) -> Crossing:
    """Return the least of a chain that passes each cluster in one go; infinite where no order is joined.

    A message of `num_bytes` may come early, once, where a way has jitter.
    """
    hops_s, wires_s = {}, []
    for a, b in itertools.permutations(clusters, 2):
        there, back = ways.way(a, b), ways.way(b, a)
        if there and back:
            each_s = [num_bytes / way.bytes_per_s for way in (there, back)]
            delays_s = [way.delay_s if way.steady else 0.0 for way in (there, back)]
            hops_s[a, b] = min(map(sum, zip(delays_s, each_s, strict=True)))
            wires_s.append(max(each_s))
    orders = map(itertools.pairwise, itertools.permutations(clusters))
    least_s = min(sum(hops_s.get(ends, math.inf) for ends in order) for order in orders)
    return Crossing(2 * least_s, min(wires_s, default=0.0))
