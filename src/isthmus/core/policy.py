"""`OwnerPolicy`: what the owner of a site lets the pool do there. `policy.yaml` is its file form.

It stays at the site: the site's own agent enforces it, and refuses what breaks it, whoever orders it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus.core.base import Fraction, Frozen, Index, Name, NotNegative
from isthmus.core.pool import Cluster, UnknownNameError


class OwnerPolicy(Frozen):
    """What the owner of a site lets the pool do there.

    The pool's jobs may hold at most `pool_chips` of a node group, or `pool_share` of one that is not named
    there. Local jobs of level `preemptible_from` and of those below it may be preempted by the pool's jobs
    of a higher level; without it none may. A preempted job gets SIGTERM and `grace_s` later SIGKILL, and goes
    back to its place in the queue. With `local_evicts_pool` a local job takes the cards of the pool's jobs of
    a lower level where it finds no others; those that train have `protect_s` to save their work first. A job
    of the pool that waits before local jobs holds free cards back from them for `hold_back_s` at most.
    """

    version: Literal[1] = 1
    pool_share: Fraction = 1.0
    pool_chips: dict[Name, Index] = Field(default_factory=dict)
    preemptible_from: Name | None = None
    grace_s: NotNegative = 30.0
    local_evicts_pool: bool = True
    protect_s: NotNegative = 60.0
    hold_back_s: NotNegative = 0.0

    def limit(self, node_group: str, chips: int) -> int:
        """Return how many of the `chips` of `node_group` the pool's jobs may hold at once."""
        return min(chips, self.pool_chips.get(node_group, int(self.pool_share * chips)))

    def check(self, cluster: Cluster) -> None:
        """Raise `UnknownNameError` where the policy names a node group or a level that `cluster` lacks."""
        groups = [group.name for group in cluster.node_groups]
        for group in self.pool_chips:
            if group not in groups:
                raise UnknownNameError("node group", group, groups)
        levels = cluster.priorities.levels
        if self.preemptible_from is not None and self.preemptible_from not in levels:
            raise UnknownNameError("priority level", self.preemptible_from, levels)
