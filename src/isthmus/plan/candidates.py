"""What there is to choose from: `Device` lists, one per ordered choice of clusters and chips."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.core.chip import Chip
from isthmus.core.job import Placement
from isthmus.core.pool import Cluster, NodeGroup, Pool

MAX_CLUSTERS = 4
"""Largest number of clusters that one plan may join."""

MAX_CHOICES = 400
"""Largest number of chip counts tried for one ordered choice of clusters."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One chip that can hold a stage, and where it is."""

    cluster: str
    group: NodeGroup
    chip: Chip


def eligible_clusters(pool: Pool, placement: Placement) -> tuple[Cluster, ...]:
    """Return the clusters that the job's placement admits."""
    return tuple(
        cluster
        for cluster in pool.clusters
        if (not placement.clusters or cluster.name in placement.clusters)
        and (not placement.owners or cluster.owner in placement.owners)
    )


def free_devices(
    pool: Pool, cluster: Cluster, placement: Placement, free: Mapping[str, Mapping[str, int]] | None
) -> tuple[Device, ...]:
    """Return the free chips of a cluster that the job admits, fastest group first.

    `free` maps cluster and node group to a number of chips; None takes all chips to be free.
    """
    devices: list[Device] = []
    for group in cluster.node_groups:
        if placement.chips and group.chip not in placement.chips:
            continue
        count = group.chips if free is None else free.get(cluster.name, {}).get(group.name, 0)
        chip = pool.chip(group)
        devices += [Device(cluster=cluster.name, group=group, chip=chip)] * min(count, group.chips)
    return tuple(sorted(devices, key=lambda d: -d.chip.flop_per_s("bf16")))


def subsets(clusters: tuple[Cluster, ...]) -> Iterator[tuple[Cluster, ...]]:
    """Yield every combination of up to `MAX_CLUSTERS` clusters, small ones first."""
    for size in range(1, min(MAX_CLUSTERS, len(clusters)) + 1):
        yield from itertools.combinations(clusters, size)


def device_chains(
    devices: Mapping[str, tuple[Device, ...]], order: tuple[str, ...], max_stages: int
) -> Iterator[tuple[Device, ...]]:
    """Yield chains of devices that use every cluster of `order`, in that order, longest first.

    Where there are too many chip counts to try them all, they are thinned to powers of two and the largest.
    """
    counts = [list(range(1, min(len(devices[name]), max_stages) + 1)) for name in order]
    total = 1
    for options in counts:
        total *= len(options)
    if total > MAX_CHOICES:
        counts = [[n for n in options if n & (n - 1) == 0 or n == options[-1]] for options in counts]
    chosen = sorted(itertools.product(*counts), key=lambda numbers: (-sum(numbers), numbers))
    for numbers in chosen[:MAX_CHOICES]:
        if sum(numbers) <= max_stages:
            yield tuple(
                device for name, n in zip(order, numbers, strict=True) for device in devices[name][:n]
            )
