"""Two node groups of unlike chips in one cluster are joined by their nodes' network, the slower of the two."""

import pytest

from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.plan import estimate_s, predict, profile_model
from isthmus.plan.search.costs.gradient_ring import gradient_ring_s
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.collectives import NETWORK_HOP_S
from isthmus.plan.time.stage_costs import stage_costs
from tests.plan.hand import model_of
from tests.plan.published import published
from tests.plan.test_search_properties import ask

PROFILE = profile_model(model_of())
NETWORK_SHARE, NETWORK_LATENCY_S = (DATA_SHEET.value(name) for name in ("network_share", "network_latency_s"))


def mixed_pool(slow_gbps: float = 1.0, fast_gbps: float = 400.0) -> Pool:
    """Return one cluster with two nodes of A100s on a slow network and two of H100s on a fast one."""
    groups = [
        {"name": name, "chip": chip, "nodes": 2, "chips_per_node": 8, "network_gbps": gbps}
        for name, chip, gbps in (("old", "A100", slow_gbps), ("new", "H100", fast_gbps))
    ]
    return Pool.model_validate({"clusters": [{"name": "c", "owner": "o", "node_groups": groups}]})


def replicas(*groups: str, tp: int = 8, **fields: object) -> Plan:
    """Return a plan with one replica of one stage in each of `groups`."""
    stages = tuple(
        Stage(replica=i, cluster="c", node_group=name, layers=(0, 8), tp=tp) for i, name in enumerate(groups)
    )
    sizes = {"micro_batches": 2, "micro_batch_size": 1, "sequence_length": 512}
    return Plan.model_validate({"id": "mixed", "stages": stages, "dp": len(groups)} | sizes | fields)


def test_a_reduction_across_1_gbits_takes_what_1_gbits_gives():
    """Two replicas of 8 chips: a ring of two passes all bytes once over 8 x 1 Gbit/s x the network's share."""
    plan, pool = replicas("old", "new"), mixed_pool()
    cost = stage_costs(plan, pool, PROFILE, DATA_SHEET, 0)[0]
    expected_s = cost.load.gradient_bytes / (8 * 1e9 / 8 * NETWORK_SHARE) + NETWORK_LATENCY_S + 2 * NETWORK_HOP_S
    joined = estimate_s(plan, pool, PROFILE)
    alone = max(estimate_s(replicas(name), pool, PROFILE) for name in ("old", "new"))
    assert expected_s > 1
    assert joined - alone == pytest.approx(expected_s, rel=1e-6)
    simulated = predict(plan, pool, PROFILE).iteration_s - max(
        predict(replicas(name), pool, PROFILE).iteration_s for name in ("old", "new")
    )
    assert simulated == pytest.approx(expected_s, rel=1e-3)


def test_the_slower_network_joins_the_nodes_in_either_order():
    """Which group comes first makes no difference; a faster network on both sides does."""
    slow = [predict(replicas(*names), mixed_pool(), PROFILE).iteration_s for names in (("old", "new"), ("new", "old"))]
    assert slow[0] == pytest.approx(slow[1], rel=1e-9)
    assert predict(replicas("old", "new"), mixed_pool(400.0), PROFILE).iteration_s < slow[0] / 5


def test_replicas_of_one_node_reduce_inside_it_first():
    """Four replicas of two chips in two nodes: each node sends its sum once, over 8 chips' network."""
    plan, pool = replicas("old", "old", "old", "old", "new", "new", "new", "new", tp=2), mixed_pool()
    places = stage_costs(plan, pool, PROFILE, DATA_SHEET, 0)[0].reducing
    assert [(place.count, place.tiers) for place in places] == [(4, (4, 1)), (4, (4, 1))]
    cost = stage_costs(plan, pool, PROFILE, DATA_SHEET, 0)[0]
    between_s = cost.load.gradient_bytes / (8 * 1e9 / 8 * NETWORK_SHARE)
    alone = estimate_s(replicas("old", tp=2), pool, PROFILE)
    assert estimate_s(plan, pool, PROFILE) - alone == pytest.approx(between_s, rel=0.02)


def test_experts_over_unlike_groups_exchange_across_the_slower_network():
    """Mixtral's experts over two nodes of 8: half of each token's copies crosses 1 Gbit/s, whichever group is first."""
    profile, sizes = profile_model(published("mixtral-8x7b")), {"tokens": 4096, "copies": 2, "width": 4096}

    def plan(*groups: str, ep: int) -> Plan:
        stages = tuple(
            Stage(replica=i, cluster="c", node_group=name, layers=(0, 32), tp=4, ep=ep, sp=True)
            for i, name in enumerate(groups)
        )
        fields = {"micro_batches": 1, "micro_batch_size": 1, "sequence_length": sizes["tokens"]}
        return Plan(id="p", stages=stages, dp=len(groups), **fields)

    def forward_s(*groups: str, ep: int, of: int = 0) -> float:
        return stage_costs(plan(*groups, ep=ep), mixed_pool(), profile, DATA_SHEET, of)[0].time.forward_s

    rate = 1e9 / 8 * NETWORK_SHARE
    sent = sizes["tokens"] / 4 * sizes["copies"] * sizes["width"] * 2
    least_s = 32 * 2 * (sent / 2 / rate + NETWORK_LATENCY_S)
    for order in (("old", "new"), ("new", "old")):
        for of in (0, 1):
            crossing_s = forward_s(*order, ep=8, of=of)
            inside_s = forward_s(order[of], order[of], ep=8)
            assert crossing_s == pytest.approx(inside_s + least_s, rel=0.05)
    pairs = ("new", "new", "old", "old")
    assert forward_s(*pairs, ep=8) == pytest.approx(forward_s("new", "new", ep=8)), "each pair has its own node"
    assert forward_s("new", "old", ep=4) == pytest.approx(forward_s("new", "new", ep=4)), "inside a stage"
    assert forward_s("new", "old", "new", "old", ep=8) > 2 * forward_s(*pairs, ep=8), "the pairs are mixed"


def test_a_message_between_unlike_groups_crosses_the_slower_network():
    """Two stages of one pipeline on two groups: boundary bytes over the narrower stage's network cards."""
    cuts = [("old", (0, 4), 8), ("new", (4, 8), 4)]
    stages = tuple(Stage(cluster="c", node_group=name, layers=layers, tp=tp) for name, layers, tp in cuts)
    plan = Plan(id="p", stages=stages, micro_batches=2, micro_batch_size=1, sequence_length=512)
    load = stage_costs(plan, mixed_pool(), PROFILE, DATA_SHEET, 0)[0].load
    expected_s = NETWORK_LATENCY_S + load.boundary_bytes / 4 / (1e9 / 8 * NETWORK_SHARE)
    assert load.hop_s == pytest.approx(expected_s)


def test_a_replica_over_several_groups_counts_in_each_by_its_layers():
    """A replica with half of the layers in each group adds one member to both."""
    stages = (
        Stage(replica=0, cluster="c", node_group="old", layers=(0, 8)),
        Stage(replica=1, cluster="c", node_group="old", layers=(0, 4)),
        Stage(replica=1, cluster="c", node_group="new", layers=(4, 8)),
    )
    plan = Plan(id="p", stages=stages, dp=2, micro_batches=2, micro_batch_size=1, sequence_length=512)
    assert plan.reducing_replicas(stages[0]) == {"old": (2, 1), "new": (1, 1)}
    assert plan.reducing_replicas(stages[2]) == {"new": (1, 1), "old": (1, 1)}


def test_the_search_charges_the_network_between_groups():
    """Before the split it counts the bytes of all gradients over all of the slower group's network cards."""
    pool = mixed_pool()
    cluster = pool.clusters[0]
    workload = TrainingWorkload(PROFILE, 512, "bf16", DATA_SHEET)
    groups = [
        (ChipSlot(cluster="c", owner="o", group=group, chip=pool.chip(group), chips=group.num_chips),)
        for group in cluster.node_groups
    ]
    seconds = gradient_ring_s(workload, Routes(pool, DATA_SHEET), groups, 0)
    assert seconds == pytest.approx(4 * PROFILE.num_parameters / (16 * 1e9 / 8 * NETWORK_SHARE))
    assert gradient_ring_s(workload, Routes(pool, DATA_SHEET), groups[:1], 0) == 0


def test_the_estimate_charges_what_the_simulation_takes_between_groups():
    """Replicas in three node groups, or in groups of two of them: no plan found is estimated more than 1 % too fast."""
    kinds = {"old": 2e13, "mid": 6e13, "new": 2e14}
    chips = [
        {
            "name": name, "peak_flop_per_s": {"bf16": flops}, "memory_bytes": 8 * 10**9, "power_w": 400,
            "memory_bandwidth_bytes_per_s": 2e12, "in_node_link": {"name": "x", "bandwidth_bytes_per_s": 2e11},
        }
        for name, flops in kinds.items()
    ]  # fmt: skip
    groups = [{"name": name, "chip": name, "nodes": 1, "chips_per_node": 2, "network_gbps": 400} for name in kinds]
    cluster = {"name": "c", "owner": "o", "node_groups": groups}
    found = ask(Pool.model_validate({"chips": chips, "clusters": [cluster]}), num_plans=64).scored
    assert any(len(one.layout.pipelines) > 1 for one in found)
    low = {one.plan.id: one.layout.estimate_s / one.time_s for one in found}
    assert min(low.values()) > 0.99, low
