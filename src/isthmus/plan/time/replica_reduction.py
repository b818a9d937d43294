"""Collectives of gradients over replicas whose chips may be in unlike node groups of one cluster.

Chips of one node use its links; nodes are joined by their network, and two nodes by the slower of theirs. A
collective is hierarchical: inside the nodes, then between all of them. With a single node group the times are those
of `collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Aggregators, Cluster
from isthmus.plan.time.collectives import (
    NETWORK_HOP_S,
    NODE_HOP_S,
    Topology,
    all_gather_s,
    all_reduce_bytes_per_s,
    all_reduce_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)
from isthmus.sim import SyncCluster, SyncServers


@dataclass(frozen=True, kw_only=True)
class ReplicaPlace:
    """`count` replicas of a stage in one node group, each on `num_chips` chips."""

    topology: Topology
    count: int
    num_chips: int

    @property
    def tiers(self) -> tuple[int, int]:
        """Replicas per node, and nodes."""
        return self.topology.tiers(self.count, self.num_chips)

    @property
    def network_bytes_per_s(self) -> float:
        """Rate at which the chips of one node exchange a stage's gradients with other nodes."""
        return self.topology.network_bytes_per_s * self.num_chips * self.tiers[0]


def expert_places(plan: Plan, stage: Stage) -> tuple[tuple[str, int], ...]:
    """Return the node groups of the chips with which `stage` exchanges tokens, each with their number, its own first.

    Empty where the stage's own chips hold all experts. Otherwise `ep` chips in order, replica by replica, share them
    (`isthmus.core.runs.runnable.expert_groups`); a stage of several groups exchanges with all of theirs.
    """
    if stage.num_chips % stage.ep == 0:
        return ()
    alike = [one for one in plan.stages if (one.cluster, one.layers, one.ep) == (stage.cluster, stage.layers, stage.ep)]
    first, intervals = 0, []
    for one in sorted(alike, key=lambda one: one.replica):
        intervals.append((one, first, first + one.num_chips))
        first += one.num_chips
    own = next((start, end) for one, start, end in intervals if one == stage)
    low, high = own[0] // stage.ep * stage.ep, -(-own[1] // stage.ep) * stage.ep
    places = {stage.node_group: 0}
    for one, start, end in intervals:
        inside = min(high, end) - max(low, start)
        if inside > 0:
            places[one.node_group] = places.get(one.node_group, 0) + inside
    return tuple(places.items())


def joined_topology(places: Sequence[tuple[Topology, int]]) -> Topology:
    """Return the links of a group of chips in unlike node groups: of each kind the slowest, nodes of the smallest."""
    return Topology(
        chips_per_node=min(min(one.chips_per_node, count) for one, count in places),
        link_bytes_per_s=min(one.link_bytes_per_s for one, _ in places),
        link_latency_s=max(one.link_latency_s for one, _ in places),
        network_bytes_per_s=min(one.network_bytes_per_s for one, _ in places),
        network_latency_s=max(one.network_latency_s for one, _ in places),
    )


def replicas_all_reduce_s(places: Sequence[ReplicaPlace], num_bytes: float) -> float:
    """Return the seconds of an all-reduce of a stage's `num_bytes` over the replicas of all `places`."""
    if len(places) == 1:
        one = places[0]
        return all_reduce_s(one.topology, num_bytes / one.num_chips, one.count, one.num_chips)
    inside_s = 0.0
    for one in places:
        inside, _ = one.tiers
        if inside > 1:
            args = (num_bytes / one.num_chips, inside, one.topology.link_bytes_per_s, NODE_HOP_S)
            local_s = one.topology.link_latency_s + min(ring_all_reduce_s(*args), tree_all_reduce_s(*args))
            inside_s = max(inside_s, local_s)
    nodes, rate = sum(one.tiers[1] for one in places), min(one.network_bytes_per_s for one in places)
    args = (num_bytes, nodes, rate, NETWORK_HOP_S)
    latency_s = max(one.topology.network_latency_s for one in places)
    return inside_s + latency_s + min(ring_all_reduce_s(*args), tree_all_reduce_s(*args))


def replicas_all_reduce_bytes_per_s(places: Sequence[ReplicaPlace]) -> float:
    """Return the rate R of a large all-reduce over p replicas, which takes 2 (p - 1) / p x bytes / R seconds.

    R is that of all chips of a stage; a replica that reduces with no other counts as one of two.
    """
    if len(places) == 1:
        one = places[0]
        return one.num_chips * all_reduce_bytes_per_s(one.topology, max(2, one.count), one.num_chips)
    size, num_bytes = sum(one.count for one in places), 1e15
    return 2 * (size - 1) / size * num_bytes / replicas_all_reduce_s(places, num_bytes)


def replicas_all_gather_s(places: Sequence[ReplicaPlace], num_bytes: float) -> float:
    """Return the seconds of an all-gather to a stage's whole `num_bytes`, as half of an all-reduce between nodes."""
    if len(places) == 1:
        one = places[0]
        return all_gather_s(one.topology, num_bytes / one.num_chips, one.count, one.num_chips)
    return replicas_all_reduce_s(places, num_bytes) / 2


def hybrid_reduce_s(
    places: Sequence[ReplicaPlace], shard_replicas: int, gradient_bytes: float, weight_bytes: float
) -> float:
    """Return the seconds of reducing a stage's gradients in groups of `shard_replicas`, then between the groups.

    A reduce-scatter inside each group, an all-reduce of what a chip then holds between the groups, and a gather of the
    weights inside each. Source: Y. Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2, hybrid sharding. Over several
    node groups the groups are taken to be inside one.
    """
    one = max(places, key=lambda place: place.count)
    groups = -(-sum(place.count for place in places) // shard_replicas)
    inside_s = hybrid_gather_s(places, shard_replicas, gradient_bytes)
    own = gradient_bytes / one.num_chips / shard_replicas
    between_s = max(all_reduce_s(place.topology, own, groups, place.num_chips * shard_replicas) for place in places)
    return inside_s + between_s + (hybrid_gather_s(places, shard_replicas, weight_bytes) if weight_bytes else 0.0)


def hybrid_gather_s(places: Sequence[ReplicaPlace], shard_replicas: int, num_bytes: float) -> float:
    """Return the seconds of a gather to a stage's `num_bytes` (or of a reduce-scatter) inside groups of replicas."""
    return max(
        all_gather_s(place.topology, num_bytes / place.num_chips, shard_replicas, place.num_chips) for place in places
    )


def sync_servers(places: Sequence[ReplicaPlace], cluster: Cluster, num_sharing: int) -> SyncServers:
    """Return where the replicas of `places` sum a stage's gradients in `cluster`, for named strategies.

    Rates are those of all chips of a stage, as `network_bytes_per_s` is. Unlike nodes count as the slowest, each with
    the most replicas. `num_sharing` stages of a pipeline share the aggregators of the cluster.
    """
    ring = min(one.topology.link_bytes_per_s * one.num_chips for one in places)
    network = min(one.network_bytes_per_s for one in places)
    alone = SyncCluster(
        num_servers=sum(one.tiers[1] for one in places),
        chips_per_server=max(one.tiers[0] for one in places),
        num_aggregators=1,
        pcie_bytes_per_s=ring,
        upi_bytes_per_s=ring,
        nic_bytes_per_s=network,
        link_bytes_per_s=network,
        network_delay_s=NETWORK_HOP_S,
        ring_delay_s=NODE_HOP_S,
    )
    there = {one.kind: one for one in cluster.aggregators}
    servers = there.get("server")
    return SyncServers(
        place=f"cluster '{cluster.name}'",
        alone=alone,
        with_aggregators=tuple(
            (kind, _with_aggregators(alone, one, servers, num_sharing)) for kind, one in there.items()
        ),
    )


def _with_aggregators(
    alone: SyncCluster, one: Aggregators, servers: Aggregators | None, num_sharing: int
) -> SyncCluster:
    """Return `alone` with aggregators `one`; `servers` are those that take what finds no slot in a switch."""

    def rate(gbps: float | None) -> float | None:
        return None if gbps is None else gbps * 1e9 / 8 / num_sharing

    return replace(
        alone,
        num_aggregators=one.count,
        switch_bytes_per_s=rate(one.network_gbps) if one.kind == "switch" else None,
        slot_pool_bytes=None if one.slots is None else one.slots * one.slot_bytes / num_sharing,
        server_bytes_per_s=rate(servers.network_gbps) if servers else None,
    )
