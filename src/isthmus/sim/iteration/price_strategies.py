"""`price_strategies`: the time of every possible strategy for each group that sums gradients."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.errors import InputError, PlanError
from isthmus.sim.iteration.layer_segment import LayerSegment, gradient_holders, layer_segments
from isthmus.sim.iteration.merge_equal_replicas import merge_equal_replicas
from isthmus.sim.iteration.simulated_training import SimulatedTraining
from isthmus.sim.iteration.strategy_reduction import LinkOf, default_time_s, strategy_time
from isthmus.sim.links.simulated_link import SimulatedLink
from isthmus.sim.synchronisation import SyncTime
from isthmus.strategies import STRATEGIES

MAX_REPLICAS = 512
"""Largest group that is priced: the steps of a ring grow with the square of its members."""


@dataclass(frozen=True, kw_only=True)
class GroupPrices:
    """The replicas that sum the gradients of layers `[first, last)`, and what that takes."""

    layers: tuple[int, int]
    clusters: tuple[str, ...]
    num_replicas: int
    num_bytes: float
    """Bytes of gradients, of all chips of a replica."""
    default_s: float
    """Seconds of the sum that the runtime executes by default."""
    times: tuple[SyncTime, ...]
    """The possible strategies, in the order of their list."""
    impossible: tuple[tuple[str, str], ...]
    """Strategy and reason of the others."""


def price_strategies(training: SimulatedTraining) -> tuple[GroupPrices, ...]:
    """Return the prices of each group of `training` with 2 to `MAX_REPLICAS` replicas and any gradients, by layers.

    Groups are priced one by one: the links are those of the pool, free of other traffic.
    """
    classes, _ = merge_equal_replicas(training)
    segments = layer_segments(gradient_holders(classes, training.local_steps))

    def link_of(source: str, target: str) -> SimulatedLink:
        if (source, target) not in training.links:
            raise InputError(f"no link from {source} to {target}", hint="give one for each direction that is used")
        return training.links[source, target]

    groups = [group for segment in segments for group in segment.by_group]
    return tuple(
        _prices(group, link_of)
        for group in groups
        if 1 < sum(group.members_by_cluster.values()) <= MAX_REPLICAS and group.num_bytes() > 0
    )


def _prices(group: LayerSegment, link_of: LinkOf) -> GroupPrices:
    times, impossible = [], []
    for name in STRATEGIES:
        try:
            times.append(strategy_time(group, name, link_of))
        except PlanError as error:
            impossible.append((name, error.message))
    return GroupPrices(
        layers=group.layers,
        clusters=tuple(group.members_by_cluster),
        num_replicas=sum(group.members_by_cluster.values()),
        num_bytes=group.num_bytes(),
        default_s=default_time_s(group, link_of),
        times=tuple(times),
        impossible=tuple(impossible),
    )
