"""`LayerSegment`: a range of layers whose gradients the same stages hold, one of each replica."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus.core.plan import group_replicas_by_cluster
from isthmus.sim.iteration.simulated_training import Replica
from isthmus.sim.synchronisation import SyncServers


@dataclass(frozen=True, kw_only=True)
class GradientHolder:
    """A stage as the holder of the gradients of layers `[first, last)`."""

    replica: int
    """Number of the replica, or of the class of equal replicas."""
    stage: int
    cluster: str
    layers: tuple[int, int]
    gradient_bytes: float
    local_bytes_per_s: float
    """Rate of a collective inside the cluster."""
    num_replicas: int
    """Number of equal replicas that it stands for."""
    averaged_bytes: float = 0.0
    """Bytes of the same layers that the groups average (local steps)."""
    group: int = 0
    """Number of its replica group (local steps)."""
    servers: SyncServers | None = None
    """The servers of the cluster that sum the gradients, for a named strategy."""


@dataclass(frozen=True, kw_only=True)
class LayerSegment:
    """Layers `[first, last)` and their `holders`, one per replica or class of equal replicas."""

    layers: tuple[int, int]
    holders: tuple[GradientHolder, ...]

    @property
    def members_by_cluster(self) -> dict[str, int]:
        """Number of members per cluster, in order of first use."""
        counts: dict[str, int] = {}
        for holder in self.holders:
            counts[holder.cluster] = counts.get(holder.cluster, 0) + holder.num_replicas
        return counts

    @property
    def by_group(self) -> tuple[LayerSegment, ...]:
        """The segment of each group of replicas."""
        numbers = sorted({holder.group for holder in self.holders})
        return tuple(replace(self, holders=tuple(h for h in self.holders if h.group == n)) for n in numbers)

    def num_bytes(self, *, averaged: bool = False) -> float:
        """Return the bytes of gradients (or of averaged parameters) of the segment at its largest holder."""
        first, last = self.layers
        return max(_holder_bytes(h, averaged) * (last - first) / (h.layers[1] - h.layers[0]) for h in self.holders)

    def local_s(self, *, averaged: bool = False) -> float:
        """Return the time of the reduce-scatter (equally, the all-gather) in the slowest cluster."""
        slowest_s, clusters = 0.0, self.members_by_cluster
        for holder in self.holders:
            members = clusters[holder.cluster]
            share = (members - 1) / members
            slowest_s = max(slowest_s, share * _holder_bytes(holder, averaged) / holder.local_bytes_per_s)
        return slowest_s


def _holder_bytes(holder: GradientHolder, averaged: bool) -> float:
    return holder.averaged_bytes if averaged else holder.gradient_bytes


def layer_segments(holders: Sequence[GradientHolder]) -> tuple[LayerSegment, ...]:
    """Return the segments between the stage boundaries of all replicas, in order of layers."""
    cuts = sorted({end for holder in holders for end in holder.layers})
    result = []
    for first, last in itertools.pairwise(cuts):
        members = tuple(h for h in holders if h.layers[0] <= first and last <= h.layers[1])
        if sum(h.num_replicas for h in members) > 1:
            result.append(LayerSegment(layers=(first, last), holders=members))
    return tuple(result)


def gradient_holders(replicas: Sequence[Replica], local_steps: int) -> list[GradientHolder]:
    """Return the stages of all `replicas` as holders; with local steps, each is in the group of its clusters."""
    groups = (0,) * len(replicas)
    if local_steps > 1:
        groups = group_replicas_by_cluster([{load.cluster for load in one.stages} for one in replicas])
    return [
        GradientHolder(
            replica=number,
            stage=stage,
            cluster=load.cluster,
            layers=load.layers,
            gradient_bytes=load.gradient_bytes,
            local_bytes_per_s=load.local_bytes_per_s,
            num_replicas=replica.count,
            averaged_bytes=load.averaged_bytes,
            group=group,
            servers=load.servers,
        )
        for number, (replica, group) in enumerate(zip(replicas, groups, strict=True))
        for stage, load in enumerate(replica.stages)
    ]
