"""Reductions over the replicas of a stage by hand: places, unlike node groups, groups that shard, aggregators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Aggregators, Cluster, NodeGroup
from isthmus.plan.time.collectives import NETWORK_HOP_S, NODE_HOP_S, Topology, all_gather_s, all_reduce_s
from isthmus.plan.time.replica_reduction import (
    ReplicaPlace,
    expert_places,
    hybrid_gather_s,
    hybrid_reduce_s,
    joined_topology,
    replicas_all_gather_s,
    replicas_all_reduce_bytes_per_s,
    replicas_all_reduce_s,
    sync_servers,
)
from isthmus.sim import SyncCluster, SyncServers
from tests.plan.round_numbers import UNIT

H, N = NODE_HOP_S, NETWORK_HOP_S
WIDE = Topology(
    chips_per_node=8, link_bytes_per_s=4.0, link_latency_s=2.0, network_bytes_per_s=1.0, network_latency_s=7.0
)
"""Eight chips a node, on slower links than `UNIT`'s: 2 s and 4 bytes a second, 7 s and one byte a second."""


def place(count: int, num_chips: int, topology: Topology = UNIT) -> ReplicaPlace:
    """Replicas of a stage in one node group."""
    return ReplicaPlace(topology=topology, count=count, num_chips=num_chips)


@pytest.mark.parametrize(
    ("count", "num_chips", "tiers", "rate"),
    [(6, 2, (2, 3), 8.0), (1, 1, (1, 1), 2.0), (4, 1, (4, 1), 8.0), (3, 4, (1, 3), 8.0), (2, 8, (1, 2), 16.0)],
)
def test_replicas_share_nodes_and_all_chips_of_a_node_its_network(
    count: int, num_chips: int, tiers: tuple[int, int], rate: float
) -> None:
    """Two stages of two chips in a node of four: 4 x 2 bytes a second; a stage over two nodes has that of both."""
    assert (place(count, num_chips).tiers, place(count, num_chips).network_bytes_per_s) == (tiers, rate)


def test_unlike_groups_are_joined_by_the_worst_of_each_kind_of_link() -> None:
    """And by nodes of the smallest: of a group's node, or of the chips that take part."""
    worst = Topology(
        chips_per_node=4, link_bytes_per_s=4.0, link_latency_s=2.0, network_bytes_per_s=1.0, network_latency_s=10.0
    )
    for ends in (((UNIT, 6), (WIDE, 9)), ((WIDE, 9), (UNIT, 6))):
        assert joined_topology(ends) == worst
    assert joined_topology(((UNIT, 6), (WIDE, 3))) == replace(worst, chips_per_node=3)
    assert joined_topology(((UNIT, 2), (WIDE, 3))) == replace(worst, chips_per_node=2)


def test_one_place_reduces_and_gathers_as_its_topology_says() -> None:
    """Replicas of two chips: each chip half of the bytes, with chips two positions apart."""
    six = (place(6, 2),)
    assert replicas_all_reduce_s(six, 96.0) == all_reduce_s(UNIT, 48.0, 6, 2)
    assert replicas_all_reduce_s(six, 96.0) == pytest.approx(1 + 2 * H + 48 / 8 + 10 + 4 * N + 4 / 3 * 24 / 2)
    assert replicas_all_gather_s(six, 96.0) == all_gather_s(UNIT, 48.0, 6, 2)
    assert replicas_all_gather_s(six, 96.0) == pytest.approx(1 + H + 24 / 8 + 10 + 2 * N + 2 / 3 * 24 / 2)


def test_unlike_places_reduce_inside_the_slowest_node_and_then_over_all_nodes() -> None:
    """Two of 4 in a node of UNIT, one of 2 alone in WIDE's: a ring over three nodes at the rate of the slowest.

    Nodes: 2 + 1; rates 2 x 1 x 4 and 1 x 2 x 1 bytes a second; 10 s before.
    """
    places = (place(2, 4), place(1, 2, WIDE))
    between_s = 10 + 4 * N + 4 / 3 * 96 / 2
    assert replicas_all_reduce_s(places, 96.0) == pytest.approx(between_s, rel=1e-12)
    assert replicas_all_gather_s(places, 96.0) == pytest.approx(between_s / 2, rel=1e-12)
    inside = (place(4, 2), place(4, 2, WIDE))
    slower_s = 2 + 6 * H + 6 / 4 * 48 / 4
    between_s = 10 + 4 * N + 4 / 3 * 96 / min(2 * 2 * 2, 1 * 2 * 4)
    assert replicas_all_reduce_s(inside, 96.0) == pytest.approx(slower_s + between_s, rel=1e-12)
    few_s = 2 + 4 * H + 2 * 48e-9 / 4 + 10 + 4 * N + min(4 / 3, 2) * 96e-9 / 8
    assert replicas_all_reduce_s(inside, 96e-9) == pytest.approx(few_s, rel=1e-12, abs=1e-9)


def test_the_rate_of_a_place_is_that_of_all_chips_of_a_stage() -> None:
    """2 chips x 8 bytes a second in a node; a single replica counts as one of two; of two places by their ring."""
    assert replicas_all_reduce_bytes_per_s((place(2, 2),)) == pytest.approx(2 * 8, rel=1e-9)
    assert replicas_all_reduce_bytes_per_s((place(1, 2),)) == pytest.approx(2 * 8, rel=1e-9)
    assert replicas_all_reduce_bytes_per_s((place(1, 4),)) == pytest.approx(4 * 2, rel=1e-9)
    assert replicas_all_reduce_bytes_per_s((place(3, 4),)) == pytest.approx(4 * 2, rel=1e-9)
    pair = (place(2, 4), place(1, 2, WIDE))
    assert replicas_all_reduce_bytes_per_s(pair) == pytest.approx(2, rel=1e-9)


def test_groups_that_shard_reduce_inside_and_a_part_between() -> None:
    """8 replicas of one chip in groups of 4: a gather of 96 bytes in a node, an all-reduce of 24 between two groups.

    The gather of the weights is as the scatter of gradients, and left out where there is none.
    """
    eight = (place(8, 1),)
    inside_s, between_s = 1 + 3 * H + 72 / 8, 10 + 2 * N + 24 / 2
    assert hybrid_gather_s(eight, 4, 96.0) == pytest.approx(inside_s, rel=1e-12)
    assert hybrid_reduce_s(eight, 4, 96.0, 0.0) == pytest.approx(inside_s + between_s, rel=1e-12)
    gather_s = 1 + 3 * H + 36 / 8
    assert hybrid_reduce_s(eight, 4, 96.0, 48.0) == pytest.approx(inside_s + between_s + gather_s, rel=1e-12)


def test_groups_that_shard_two_chips_a_stage_leave_each_its_part() -> None:
    """6 replicas of two chips in groups of two: 48 bytes a chip, of which 24 between three groups, 4 chips apart."""
    six = (place(6, 2),)
    inside_s, between_s = 1 + H + 24 / 8, 10 + 4 * N + 4 / 3 * 24 / 2
    assert hybrid_reduce_s(six, 2, 96.0, 0.0) == pytest.approx(inside_s + between_s, rel=1e-12)
    uneven_s = 1 + H + 24 / 8 + 10 + 6 * N + 6 / 4 * 24 / 2
    assert hybrid_reduce_s((place(7, 2),), 2, 96.0, 0.0) == pytest.approx(uneven_s, rel=1e-12)
    near_s = 1 + H + 48 / 8 + 1 + 2 * H + 48 / 8
    assert hybrid_reduce_s((place(3, 1),), 2, 96.0, 0.0) == pytest.approx(near_s, rel=1e-12), "two groups in a node"


def test_the_slower_of_unlike_places_sets_each_part_of_a_sharded_reduction() -> None:
    """WIDE's links inside, the network of UNIT's node of 4 between; a part of the place with most replicas.

    4 + 2 replicas of one chip in groups of 2: 3 groups; a chip holds 48 of 96 bytes.
    """
    places = (place(4, 1), place(2, 1, WIDE))
    inside_s = 2 + H + 48 / 4
    near_s = 1 + 2 * H + 48 / 8 + 10 + 2 * N + 24 / 2
    far_s = 2 + 4 * H + 4 / 3 * 48 / 4
    assert near_s > far_s
    assert hybrid_gather_s(places, 2, 96.0) == pytest.approx(inside_s, rel=1e-12)
    for order in (places, places[::-1]):
        assert hybrid_reduce_s(order, 2, 96.0, 0.0) == pytest.approx(inside_s + near_s, rel=1e-12)
    unlike = (place(4, 2), place(2, 1, WIDE))
    own_s = all_reduce_s(WIDE, 96.0 / 2 / 2, 3, 2), all_reduce_s(UNIT, 96.0 / 2 / 2, 3, 4)
    gathers_s = all_gather_s(UNIT, 48.0, 2, 2), all_gather_s(WIDE, 96.0, 2, 1)
    for order in (unlike, unlike[::-1]):
        assert hybrid_reduce_s(order, 2, 96.0, 0.0) == pytest.approx(max(gathers_s) + max(own_s), rel=1e-12)


def plan_of(*stages: tuple[int, str, tuple[int, int], int, int], cluster: str = "c") -> Plan:
    """A plan of stages of (replica, node group, layers, chips, ep)."""
    made = tuple(
        Stage(replica=replica, cluster=cluster, node_group=group, layers=layers, tp=chips, ep=ep)
        for replica, group, layers, chips, ep in stages
    )
    dp = 1 + max(stage.replica for stage in made)
    return Plan(id="p", stages=made, dp=dp, micro_batches=1, micro_batch_size=1, sequence_length=8)


def test_experts_are_shared_by_chips_in_order_replica_by_replica() -> None:
    """Four replicas of two chips in groups of four: the first two in `x` and `y`, the last two in `z` alone."""
    plan = plan_of(*[(index, name, (0, 4), 2, 4) for index, name in enumerate("xyzz")])
    assert [expert_places(plan, stage) for stage in plan.stages] == [
        (("x", 2), ("y", 2)), (("y", 2), ("x", 2)), (("z", 4),), (("z", 4),)
    ]  # fmt: skip
    shuffled = plan.model_copy(update={"stages": tuple(reversed(plan.stages))})
    assert expert_places(shuffled, plan.stages[0]) == (("x", 2), ("y", 2))


def test_a_stage_over_two_groups_of_experts_exchanges_with_both() -> None:
    """Three chips each in groups of two: the second stage has chips 3 to 5, in the groups 2 to 3 and 4 to 5."""
    plan = plan_of((0, "x", (0, 4), 3, 2), (1, "y", (0, 4), 3, 2))
    assert expert_places(plan, plan.stages[0]) == (("x", 3), ("y", 1))
    assert expert_places(plan, plan.stages[1]) == (("y", 3), ("x", 1))


def test_experts_inside_a_stage_or_of_other_layers_are_shared_with_nobody() -> None:
    """One chip, a stage of whole groups; stages of other layers, clusters or degrees do not count."""
    whole = plan_of((0, "x", (0, 4), 4, 2), (1, "y", (0, 4), 4, 2))
    assert [expert_places(whole, stage) for stage in whole.stages] == [(), ()]
    assert expert_places(plan_of((0, "x", (0, 4), 2, 1)), whole.stages[0]) == ()
    two = plan_of((0, "x", (0, 4), 2, 4), (0, "y", (4, 8), 2, 4), (1, "z", (0, 4), 2, 4), (1, "w", (4, 8), 2, 4))
    assert expert_places(two, two.stages[1]) == (("y", 2), ("w", 2))
    other = two.stages[3].model_copy(update={"cluster": "d"})
    apart = two.model_copy(update={"stages": (*two.stages[:3], other)})
    assert expert_places(apart, apart.stages[1]) == (("y", 2),)
    assert expert_places(apart, apart.stages[3]) == (("w", 2),)


def cluster_of(*aggregators: Aggregators) -> Cluster:
    """A cluster with these aggregators."""
    group = NodeGroup(name="g", chip="A100", nodes=1, chips_per_node=4)
    return Cluster(name="c", owner="o", node_groups=(group,), aggregators=aggregators)


ALONE = SyncCluster(
    num_servers=4, chips_per_server=2, num_aggregators=1, pcie_bytes_per_s=8.0, upi_bytes_per_s=8.0,
    nic_bytes_per_s=2.0, link_bytes_per_s=2.0, network_delay_s=N, ring_delay_s=H,
)  # fmt: skip
"""6 replicas of 2 chips in 3 nodes, and one of 2 in a node of WIDE: its links of 4 x 2, its network of 1 x 2 x 1."""


def test_servers_that_sum_gradients_are_nodes_of_the_slowest_kind() -> None:
    """All nodes; the most replicas of one; the rates of all chips of a stage."""
    servers = sync_servers((place(6, 2), place(1, 2, WIDE)), cluster_of(), 2)
    assert servers == SyncServers(place="cluster 'c'", alone=ALONE)
    alone = sync_servers((place(6, 2),), cluster_of(), 2).alone
    assert alone == replace(
        ALONE, num_servers=3, pcie_bytes_per_s=16.0, upi_bytes_per_s=16.0, nic_bytes_per_s=8.0, link_bytes_per_s=8.0
    )


def test_stages_of_a_pipeline_share_the_aggregators_of_their_cluster() -> None:
    """Two stages: half of 80 Gbit/s of ports, of 1,000 slots of 128 bytes, and of 8 Gbit/s of a server."""
    places = (place(6, 2), place(1, 2, WIDE))
    switch = Aggregators(kind="switch", count=3, network_gbps=80.0, slots=1000, slot_bytes=128)
    server = Aggregators(kind="server", count=5, network_gbps=8.0)
    both = sync_servers(places, cluster_of(switch, server), 2)
    assert both.alone == ALONE
    assert both.with_aggregators == (
        ("switch", replace(ALONE, num_aggregators=3, switch_bytes_per_s=5e9, slot_pool_bytes=64e3,
                           server_bytes_per_s=0.5e9)),
        ("server", replace(ALONE, num_aggregators=5, server_bytes_per_s=0.5e9)),
    )  # fmt: skip
    bare = sync_servers(places, cluster_of(Aggregators(kind="switch", count=2)), 2)
    assert bare.with_aggregators == (("switch", replace(ALONE, num_aggregators=2)),)
    plain = sync_servers(places, cluster_of(Aggregators(kind="server")), 1)
    assert plain.with_aggregators == (("server", ALONE),)
