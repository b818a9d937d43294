"""`wan_bound`: a lower bound on a pipeline's transfer time between clusters, for any order of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.costs.routes import Routes


@dataclass(frozen=True)
class WanBound:
    """Lower bounds on transfers between clusters."""

    # Seconds that a micro-batch spends between clusters, both ways.
    hops_s: float = 0.0
    # Seconds for which its message occupies a link.
    wire_s: float = 0.0


def wan_bound(clusters: Sequence[str], routes: Routes, num_bytes: float) -> WanBound:
    """Return the least over pipelines that pass each cluster once; infinite where no order is linked.

    A message has `num_bytes`. A route with jitter may deliver one message early, so its delay counts as 0.
    """
    hops_s, wires_s = {}, []
    for a, b in itertools.permutations(clusters, 2):
        there, back = routes.route(a, b), routes.route(b, a)
        if there and back:
            each_s = [num_bytes / route.bytes_per_s for route in (there, back)]
            delays_s = [route.delay_s if route.jitter_free else 0.0 for route in (there, back)]
            hops_s[a, b] = min(map(sum, zip(delays_s, each_s, strict=True)))
            wires_s.append(max(each_s))
    orders = map(itertools.pairwise, itertools.permutations(clusters))
    least_s = min(sum(hops_s.get(ends, math.inf) for ends in order) for order in orders)
    return WanBound(2 * least_s, min(wires_s, default=0.0))
