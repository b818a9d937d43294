"""`SyncServers`: where gradients are summed inside a cluster, and which aggregators are there."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.errors import PlanError
from isthmus.sim.synchronisation.sync_cluster import SyncCluster
from isthmus.strategies import AggregatorKind, find_strategy


@dataclass(frozen=True, kw_only=True)
class SyncServers:
    """The servers that sum among themselves (`alone`), and with each kind of aggregator that `place` has."""

    place: str
    """Name of the cluster, or of the clusters, for messages."""
    alone: SyncCluster
    with_aggregators: tuple[tuple[AggregatorKind, SyncCluster], ...] = ()

    def for_strategy(self, name: str) -> SyncCluster:
        """Return the cluster for strategy `name`; raise `PlanError` if an aggregator that it needs is missing."""
        strategy, there = find_strategy(name), dict(self.with_aggregators)
        for kind in (strategy.aggregator, strategy.fallback):
            if kind is not None and kind not in there:
                raise PlanError(
                    f"strategy '{name}' needs a {kind}: {self.place} has none",
                    hint="declare `aggregators` of the cluster in the pool file, or use '2d-torus', which needs none",
                )
        return there[strategy.aggregator] if strategy.aggregator else self.alone
