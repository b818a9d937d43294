"""Rules of the time model: closed forms, equation (1), monotony, and that it agrees with itself."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.chip import chip_catalogue
from isthmus.core.errors import InputError, PlanError
from isthmus.core.plan import StageTime
from isthmus.plan import DATA_SHEET, estimate_s, predict, profile_model
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.time.calibration import smooth_max
from isthmus.plan.time.collectives import (
    NODE_HOP_S,
    Topology,
    all_gather_s,
    all_reduce_bytes_per_s,
    all_reduce_s,
    all_to_all_s,
    ring_all_reduce_s,
    send_s,
    tree_all_reduce_s,
)
from isthmus.plan.time.stage_costs import stage_costs
from isthmus.plan.time.stage_time import ChipModel, MicroBatchShape, stage_pass_time
from isthmus.schedule import one_f_one_b
from isthmus.sim import run_pipeline
from tests.plan.hand import model_of, plan_of, pool_of

NODE = Topology(
    chips_per_node=8,
    link_bytes_per_s=100e9,
    link_latency_s=30e-6,
    network_bytes_per_s=10e9,
    network_latency_s=50e-6,
)


def test_closed_forms_of_collectives():
    """Alpha and beta stand where the literature puts them."""
    assert ring_all_reduce_s(8e9, 4, 1e9, 0.5) == pytest.approx(2 * 3 * 0.5 + 2 * 3 / 4 * 8)
    assert tree_all_reduce_s(8e9, 4, 1e9, 0.5) == pytest.approx(2 * 2 * 0.5 + 2 * 8)
    assert all_gather_s(NODE, 8e9, 4) == pytest.approx(30e-6 + 3 * NODE_HOP_S + 3 / 4 * 8e9 / 100e9)
    assert all_to_all_s(NODE, 8e9, 4) == pytest.approx(30e-6 + 3 / 4 * 8e9 / 100e9)
    assert send_s(NODE, 1e9, same_node=False) == pytest.approx(50e-6 + 0.1)


def test_a_collective_over_nodes_is_hierarchical():
    """16 chips on two nodes: an all-reduce inside, then one of each chip's eighth between the nodes."""
    inside = all_reduce_s(NODE, 8e9, 8)
    between = 2 * 1 / 2 * 1e9 / 10e9
    assert all_reduce_s(NODE, 8e9, 16) == pytest.approx(inside + between, rel=1e-3)
    assert NODE.tiers(16) == (8, 2)
    assert NODE.tiers(4, stride=8) == (1, 4)


def test_the_algorithm_follows_the_size():
    """Small messages take the tree's few steps, large ones the ring's full rate."""
    few, many = 1e3, 1e9
    assert all_reduce_s(NODE, few, 8) == pytest.approx(30e-6 + tree_all_reduce_s(few, 8, 100e9, NODE_HOP_S))
    assert all_reduce_s(NODE, many, 8) == pytest.approx(30e-6 + ring_all_reduce_s(many, 8, 100e9, NODE_HOP_S))


@given(
    num_bytes=st.floats(1, 1e10),
    size=st.integers(1, 64),
    stride=st.sampled_from([1, 2, 4, 8]),
    faster=st.floats(1, 10),
)
def test_collectives_are_monotone(num_bytes, size, stride, faster):
    """More bytes never take less time, faster links never more; one chip needs no time."""
    better = Topology(
        chips_per_node=8,
        link_bytes_per_s=100e9 * faster,
        link_latency_s=30e-6,
        network_bytes_per_s=10e9 * faster,
        network_latency_s=50e-6,
    )
    for collective in (all_reduce_s, all_gather_s, all_to_all_s):
        now_s = collective(NODE, num_bytes, size, stride)
        assert now_s >= 0
        assert collective(NODE, 2 * num_bytes, size, stride) >= now_s
        assert collective(better, num_bytes, size, stride) <= now_s * (1 + 1e-12)
        assert size > 1 or now_s == 0
    assert all_reduce_bytes_per_s(NODE, size, stride) > 0


def test_equation_1_of_heterogeneous_training():
    """In the steady state the faster chip idles T_d (K - 1)(N + 1) a micro-batch: here K = 2, N = 2: 3 T_d.

    T_d is the time of a micro-batch on the faster chip.
    """
    fast_s, ratio, backward = 1.0, 2.0, 2.0
    times = [
        StageTime(forward_s=fast_s, backward_s=backward * fast_s),
        StageTime(forward_s=ratio * fast_s, backward_s=ratio * backward * fast_s),
    ]
    more = run_pipeline(one_f_one_b(2, 20), times, {}, 0.0)
    less = run_pipeline(one_f_one_b(2, 19), times, {}, 0.0)
    bubble_s = more.waiting_s[0] - less.waiting_s[0]
    assert bubble_s == pytest.approx(fast_s * (ratio - 1) * (backward + 1)) == pytest.approx(3.0)


@given(a=st.floats(0, 1e3), b=st.floats(0, 1e3))
def test_smooth_max_lies_between_the_larger_and_the_sum(a, b):
    """Two things that overlap take at least the longer and at most one after the other."""
    assert max(a, b) * (1 - 1e-9) <= smooth_max(a, b) <= (a + b) * (1 + 1e-9)


FASTER = st.sampled_from(["matmul_share", "attention_share", "memory_share", "link_share", "network_share"])
SLOWER = st.sampled_from(["launch_s", "skew_s", "link_latency_s", "network_latency_s", "step_s"])


@settings(max_examples=30, deadline=None)
@given(name=FASTER, slower=SLOWER, tp=st.sampled_from([1, 2, 8]), recompute=st.sampled_from(["none", "full"]))
def test_better_parameters_never_slow_a_plan(name, slower, tp, recompute):
    """Every share speeds a plan up or leaves it; every latency slows it or leaves it."""
    plan, pool = plan_of(tp=tp, recompute=recompute), pool_of("A100", "H20")
    profile = profile_model(model_of())
    base_s = estimate_s(plan, pool, profile)
    better = DATA_SHEET.with_values({name: DATA_SHEET.value(name) * 1.2})
    worse = DATA_SHEET.with_values({slower: DATA_SHEET.value(slower) * 1.5})
    assert estimate_s(plan, pool, profile, better) <= base_s * (1 + 1e-12)
    assert estimate_s(plan, pool, profile, worse) >= base_s * (1 - 1e-12)


@settings(max_examples=20, deadline=None)
@given(gbps=st.floats(0.1, 100), more=st.floats(1, 10), delay_ms=st.floats(0, 200))
def test_a_better_link_never_slows_a_plan(gbps, more, delay_ms):
    """More bandwidth, less delay: the same plan takes as long or less, simulated."""
    plan, profile = plan_of(), profile_model(model_of())
    now = predict(plan, pool_of("A100", "A100", gbps=gbps, round_trip_ms=delay_ms), profile)
    wider = predict(plan, pool_of("A100", "A100", gbps=gbps * more, round_trip_ms=delay_ms), profile)
    nearer = predict(plan, pool_of("A100", "A100", gbps=gbps, round_trip_ms=delay_ms / 2), profile)
    assert wider.iteration_s <= now.iteration_s * (1 + 1e-9)
    assert nearer.iteration_s <= now.iteration_s * (1 + 1e-9)


def test_work_is_conserved_by_tensor_parallelism_and_grows_with_recomputation():
    """Cutting a stage in eight takes at least an eighth; recomputing adds a forward pass at most."""
    profile, pool = profile_model(model_of(hidden=4096)), pool_of("A100")
    group = pool.clusters[0].node_groups[0]
    host = ChipModel.of(group, pool.chip(group), DATA_SHEET.with_values({"launch_s": 1e-9}))
    batch = MicroBatchShape(micro_batch_size=1, sequence_length=4096, precision="bf16")
    whole = stage_pass_time(profile, (0, 8), host, batch, StageDegrees())
    cut = stage_pass_time(profile, (0, 8), host, batch, StageDegrees(tp=8))
    assert whole.forward_s / 8 < cut.forward_s < whole.forward_s
    again = stage_pass_time(profile, (0, 8), host, batch, StageDegrees(), recompute="full")
    assert whole.backward_s < again.backward_s <= whole.backward_s + whole.forward_s
    half = stage_pass_time(profile, (0, 8), host, batch, StageDegrees(), recompute="full", recompute_layers=4)
    assert whole.backward_s < half.backward_s < again.backward_s


def test_the_roofline_is_reached_by_large_products():
    """A large dense layer runs at no more than the share of the peak, and no less than two thirds of it."""
    profile, pool = profile_model(model_of(hidden=8192)), pool_of("A100")
    group = pool.clusters[0].node_groups[0]
    batch = MicroBatchShape(micro_batch_size=4, sequence_length=4096, precision="bf16")
    time = stage_pass_time(profile, (1, 7), ChipModel.of(group, pool.chip(group), DATA_SHEET), batch, StageDegrees())
    flops = sum(layer.forward_flops(4096, 4 * 4096) for layer in profile.layers[1:7])
    reached = flops / time.forward_s / chip_catalogue()["A100"].flop_per_s("bf16")
    assert 0.8 * 2 / 3 < reached < 0.8


def test_estimate_and_simulation_agree():
    """The closed form is within 5 % of the simulated iteration of a plain pipeline."""
    profile = profile_model(model_of(layers=16))
    for clusters, dp in (("aaaa", 1), ("aabb", 1), ("aa", 4)):
        plan, pool = plan_of(16, clusters, dp), pool_of("A100", "A100", gbps=100, round_trip_ms=2)
        simulated_s = predict(plan, pool, profile).iteration_s
        assert estimate_s(plan, pool, profile) == pytest.approx(simulated_s, rel=0.05)


def test_a_forecast_adds_up_and_names_its_calibration():
    """Tokens, cards and seconds agree; the calibration and what was assumed are named; the band holds it."""
    plan = plan_of(clusters="ab")
    answer = predict(plan, pool_of("A100", "BI-V150"), model_of())
    told = answer.as_dict()
    assert told["tgs_tokens_per_card_s"] == pytest.approx(8 * 2048 / told["iteration_s"] / 1.5)
    assert told["samples_per_s"] == pytest.approx(8 / told["iteration_s"])
    assert told["calibration"] == "data-sheet"
    assert told["iteration_low_s"] < told["iteration_s"] < told["iteration_high_s"]
    assert [(link["from"], link["to"]) for link in told["links"]] == [("a", "b"), ("b", "a")]
    assert {"busy_s", "bubble_s", "exposed_communication_s", "peak_memory_bytes"} == set(told["stages"][0])
    assert math.isfinite(told["stages"][1]["peak_memory_bytes"])


def test_uneven_replicas_wait_for_the_one_with_more():
    """8 and 7 micro-batches take what 8 and 8 take, for a sample less."""
    pool, model = pool_of("A100"), model_of()
    uneven = predict(plan_of(clusters="aa", dp=2, replica_micro_batches=(8, 7)), pool, model)
    even = predict(plan_of(clusters="aa", dp=2), pool, model)
    assert uneven.iteration_s == pytest.approx(even.iteration_s, rel=1e-6)
    assert (uneven.samples, even.samples) == (15, 16)


def test_zero_hides_what_it_can_and_takes_less_memory():
    """ZeRO 1 needs less memory than ZeRO 0 on every stage, and no longer update."""
    pool, profile = pool_of("A100"), profile_model(model_of())
    plain = stage_costs(plan_of(clusters="aa", dp=4), pool, profile, DATA_SHEET)
    dealt = stage_costs(plan_of(clusters="aa", dp=4, zero=1), pool, profile, DATA_SHEET)
    for a, b in zip(plain, dealt, strict=True):
        assert b.memory.static_bytes < a.memory.static_bytes
        assert b.load.update_s < a.load.update_s


def test_what_does_not_fit_is_refused():
    """Unknown places, missing links and wrong layers are named."""
    model = model_of()
    with pytest.raises(InputError, match="no cluster 'z'"):
        predict(plan_of(clusters="az"), pool_of("A100"), model)
    with pytest.raises(InputError, match="cluster 'a' has no node group 'h'"):
        predict(plan_of(clusters="a", node_group="h"), pool_of("A100"), model)
    apart = pool_of("A100", "A100").model_copy(update={"links": ()})
    with pytest.raises(PlanError, match="no link from a to b"):
        predict(plan_of(clusters="ab"), apart, model)
    with pytest.raises(PlanError, match="has 8 layers, the model 16"):
        predict(plan_of(), pool_of("A100", "A100"), model_of(layers=16))
    with pytest.raises(PlanError, match=r"ep 4 for a model without experts \(nearest valid: ep 1\)"):
        predict(plan_of(ep=4), pool_of("A100", "A100"), model)
