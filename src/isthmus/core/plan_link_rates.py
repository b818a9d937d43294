"""`plan_link_kbps`: the bandwidth that a plan's job is promised on each link, in whole kbit/s.

The coordinator allocates it, and the site's edge shapes it: both compute it here, from the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from isthmus.core.plan import Plan
from isthmus.core.pool_resource import PoolResource

KBPS_PER_GBPS = 1e6
"""kbit/s in a Gbit/s."""


def plan_link_kbps(plan: Plan, capacity_gbps: Mapping[PoolResource, float]) -> dict[PoolResource, int]:
    """Return the kbit/s that a plan sends over each link, at most the link's bandwidth, as `capacity_gbps` states it.

    Counts both directions of every hop, and the gradients of replicas at several clusters.
    """
    gbps = plan.predicted.wan_gbps if plan.predicted else ()
    found: dict[PoolResource, int] = {}
    for (one, other), rate in zip(plan.all_hops(), gbps, strict=False):
        for link in (PoolResource.link(one, other), PoolResource.link(other, one)):
            if link in capacity_gbps and rate:
                found[link] = found.get(link, 0) + math.ceil(rate * KBPS_PER_GBPS)
    for text, rate in (plan.predicted.gradient_gbps if plan.predicted else {}).items():
        link = PoolResource.parse(text)
        if link in capacity_gbps and rate:
            found[link] = found.get(link, 0) + math.ceil(rate * KBPS_PER_GBPS)
    return {link: min(rate, math.floor(capacity_gbps[link] * KBPS_PER_GBPS)) for link, rate in found.items()}
