"""Rules of the time model that no other file states; mutation tests found that each could be broken unnoticed."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from isthmus.plan import predict, profile_model
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.time.calibration import Calibration, FittedParameter
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
from isthmus.plan.time.layer_exchanges import layer_exchanges
from isthmus.plan.time.replica_reduction import (
    ReplicaPlace,
    replicas_all_gather_s,
    replicas_all_reduce_bytes_per_s,
    replicas_all_reduce_s,
)
from isthmus.plan.time.stage_time import PassTime, pass_time
from isthmus.plan.time.stage_work import ChipMicroBatch
from isthmus.sim import Interference
from tests.plan.hand import model_of, plan_of, pool_of
from tests.plan.test_pass_time import chip, work

LLAMA = profile_model(model_of())
LAYER = LLAMA.layers[0]
FAST = Topology(
    chips_per_node=8, link_bytes_per_s=100e9, link_latency_s=30e-6, network_bytes_per_s=10e9, network_latency_s=50e-6
)
SLOW = Topology(
    chips_per_node=4, link_bytes_per_s=40e9, link_latency_s=40e-6, network_bytes_per_s=5e9, network_latency_s=70e-6
)


def test_times_of_passes_add_up_part_by_part() -> None:
    """Sum and multiple hold for the whole times and for each of their parts."""
    one = PassTime(forward_s=1, backward_s=2, matmul_s=3, attention_s=4, memory_s=5, exchange_s=6)
    assert [getattr(one + one.scaled(3), field.name) for field in fields(one)] == [4, 8, 12, 16, 20, 24]
    assert one.scaled(1) == one


def test_a_key_correlates_fully_with_itself_and_with_others_as_fitted() -> None:
    """In either order; not at all where no fit says so."""
    a, b, c = "matmul_share", "memory_share", "launch_s"
    parameters = {key: FittedParameter(value=1.0, relative=0.1) for key in (a, b, c)}
    one = Calibration(name="c", source="tests", parameters=parameters, correlations={a: {b: 0.25}})
    assert [one.correlation(*pair) for pair in ((a, a), (a, b), (b, a), (a, c))] == [1.0, 0.25, 0.25, 0.0]


@pytest.mark.parametrize("num_bytes", [8.0, 1e10])
def test_replicas_in_unlike_node_groups_reduce_inside_their_nodes_and_then_between_all(num_bytes: float) -> None:
    """The slowest node, the longer latency, the slower network; by rings for many bytes, by trees for few."""
    places = (ReplicaPlace(topology=FAST, count=8, num_chips=2), ReplicaPlace(topology=SLOW, count=2, num_chips=2))
    ways = (ring_all_reduce_s, tree_all_reduce_s)
    inside_s = max(
        one.link_latency_s + min(way(num_bytes / 2, inside, one.link_bytes_per_s, NODE_HOP_S) for way in ways)
        for one, inside in ((FAST, 4), (SLOW, 2))
    )
    nodes, rate = 2 + 1, min(10e9 * 2 * 4, 5e9 * 2 * 2)
    between_s = min(way(num_bytes, nodes, rate, NETWORK_HOP_S) for way in ways)
    whole_s = inside_s + 70e-6 + between_s
    assert replicas_all_reduce_s(places, num_bytes) == pytest.approx(whole_s, rel=1e-12)
    assert replicas_all_gather_s(places, num_bytes) == pytest.approx(whole_s / 2, rel=1e-12)
    large_s = replicas_all_reduce_s(places, 1e15)
    assert replicas_all_reduce_bytes_per_s(places) == pytest.approx(2 * 9 / 10 * 1e15 / large_s, rel=1e-12)


def test_replicas_of_one_node_group_reduce_as_its_topology_says() -> None:
    """Each chip has its share of the bytes; a single replica counts as one of two."""
    one = ReplicaPlace(topology=FAST, count=6, num_chips=4)
    assert replicas_all_reduce_s((one,), 8e9) == all_reduce_s(FAST, 2e9, 6, 4)
    assert replicas_all_gather_s((one,), 8e9) == all_gather_s(FAST, 2e9, 6, 4)
    assert replicas_all_reduce_bytes_per_s((one,)) == 4 * all_reduce_bytes_per_s(FAST, 6, 4)
    alone = replace(one, count=1)
    assert replicas_all_reduce_bytes_per_s((alone,)) == 4 * all_reduce_bytes_per_s(FAST, 2, 4)


def exchanges(layer: object = LAYER, **degrees: object) -> list[tuple[str, float, int, int]]:
    """Kind, bytes, size and stride of a layer's exchanges, 100 tokens a chip in bf16."""
    share = ChipMicroBatch(tokens=100, sequence_length=800, precision_bytes=2, degrees=StageDegrees(**degrees))
    return [(one.kind, one.num_bytes, one.size, one.stride) for one in layer_exchanges(layer, share)]


def test_chips_that_share_a_sequence_exchange_keys_and_values_or_heads() -> None:
    """A gather of all tokens' keys and values; a ring of own ones; or heads there and results back, without the ring.

    16 heads of 128 values and 8 pairs of keys and values: 2,048 bytes of queries a token of 2 tensor-parallel chips.
    """
    kv_bytes, head_bytes = 100 * 2 / 2 * 2 * 8 * 128, 100 * 2 / 2 * 16 * 128
    assert exchanges(cp=4, tp=2, cp_kind="gather")[-1:] == [("all_gather", 4 * kv_bytes, 4, 2)]
    assert exchanges(cp=4, tp=2, cp_kind="ring")[-1:] == [("ring", kv_bytes, 4, 2)]
    assert exchanges(cp=4, tp=2, cp_kind="all_to_all")[-2:] == [
        ("all_to_all", head_bytes + kv_bytes, 4, 2),
        ("all_to_all", head_bytes, 4, 2),
    ]


def test_a_gather_of_8_bit_inputs_halves_the_first_half_of_a_tensor_exchange() -> None:
    """Where the products are narrow and the framework gathers them so: 1 + 2 of 4 bytes a value."""
    (plain,) = {num_bytes for _, num_bytes, _, _ in exchanges(tp=2)}
    assert plain == 100 * 2048 * 2
    for narrow, gathers, share in ((True, True, 0.75), (True, False, 1.0), (False, True, 1.0)):
        rule = LAYER.exchanges.model_copy(update={"narrow_gathers": gathers})
        layer = replace(LAYER, narrow_products=narrow, exchanges=rule)
        assert {num_bytes for _, num_bytes, _, _ in exchanges(layer, tp=2)} == {plain * share}


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    """Of the products' backward, twice the forward, the half of frozen ones that is their gradient is left out."""
    host = chip()
    bare = work(collectives=())
    plain = pass_time(host, bare, "bf16")
    for share in (0.25, 1.0):
        frozen = pass_time(host, replace(bare, frozen_flops=share * bare.matmul_flops), "bf16")
        assert plain.matmul_s - frozen.matmul_s == pytest.approx(share * plain.matmul_s / 3)
        assert plain.backward_s - frozen.backward_s == pytest.approx(share * plain.matmul_s / 3)


def test_traffic_of_others_is_noted_with_its_rate_and_its_share_of_the_time() -> None:
    """Always, or so many seconds of so many; traffic elsewhere is named as such."""
    pool, plan = pool_of("A100", "A100", "A100"), plan_of(clusters="ab")
    traffic = {
        ("a", "b"): Interference(bytes_per_s=1e9 / 8),
        ("b", "a"): Interference(bytes_per_s=1e9 / 4, on_s=2.0, off_s=3.0),
        ("a", "c"): Interference(bytes_per_s=1.0),
    }
    notes = predict(plan, pool, model_of(), interference=traffic).assumptions
    assert "traffic of others from a to b: 1 Gbit/s, always" in notes
    assert "traffic of others from b to a: 2 Gbit/s, 2 of every 5 s" in notes
    assert "traffic of others from a to c crosses no link of this plan" in notes


def test_a_stage_beyond_its_memory_is_noted_with_need_limit_and_capacity() -> None:
    """In GB of 1e9 bytes: what it needs, what the allocator may reserve, and what the chip has."""
    plan = plan_of(clusters="ab", micro_batch_size=64, micro_batches=64)
    predicted = predict(plan, pool_of("A100", "A100"), model_of())
    (note,) = [one for one in predicted.assumptions if one.startswith("stage 0 needs")]
    need_gb, limit_gb, capacity_gb = (float(word) for word in note.split() if word[0].isdigit() and "." in word)
    assert need_gb == pytest.approx(predicted.result.stages[0].peak_memory_bytes / 1e9, abs=0.05)
    cost = predicted.stages[0]
    assert limit_gb == pytest.approx(cost.memory_limit_bytes / 1e9, abs=0.05)
    assert capacity_gb == pytest.approx(cost.device_bytes / 1e9, abs=0.05)
