"""`reduce_tail`: least time after the last backward pass for the gradient ring between clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.slots import ChipSlot, flatten_pools


@dataclass(frozen=True)
class ReduceTail:
    """Seconds of the gradient ring, per parameter of a stage and fixed."""

    s_per_parameter: float = 0.0
    fixed_s: float = 0.0


NO_TAIL = ReduceTail()
"""No ring: one replica group, or groups that may reduce each layer inside a cluster."""


def reduce_tail(replica_groups: Sequence[Sequence[ChipSlot]], routes: Routes, gradient_bytes: float) -> ReduceTail:
    """Return the reduce tail of replica groups for `gradient_bytes` per parameter; infinite without links.

    The ring of a layer visits one cluster of each group, all different where no two groups share a cluster.
    Groups within one cluster have one ring for all layers: all bytes pass its slowest link, which is at most
    the fastest of all. A pipeline over several clusters may use a different next cluster per layer, so a
    stage's bytes may leave over all links of its cluster.
    """
    sets = [frozenset(slot.cluster for slot in flatten_pools(part)) for part in replica_groups]
    pairs = [not a & b for a, b in itertools.combinations(sets, 2)]
    members = len(sets) if all(pairs) else 2 if any(pairs) else 1
    if members < 2:
        return NO_TAIL
    names = sorted(frozenset.union(*sets))
    joined = {(a, b): route for a in names for b in names if (route := routes.route(a, b))}
    if not joined:
        return ReduceTail(fixed_s=math.inf)
    rate = max(route.bytes_per_s for route in joined.values())
    if not all(pairs) or any(len(one) > 1 for one in sets):
        rate = max(sum(route.bytes_per_s for ends, route in joined.items() if ends[0] == name) for name in names)
    steps = 2 * (members - 1)
    unsure = not all(route.jitter_free for route in joined.values())  # jitter may deliver one message early
    delay_s = (steps - unsure) * min(route.delay_s for route in joined.values())
    return ReduceTail(steps / members * gradient_bytes / rate, delay_s)
