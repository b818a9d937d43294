"""What the simulator takes of a stage, by hand: hops, passes, updates, offload, memory, servers.

Chips of round rates: 1e14 operations, 1e12 bytes of memory, 1e11 of the link and 1e10 of the network a second.
"""

from __future__ import annotations

import math

import pytest

from isthmus.core.plan import Plan, Stage
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.core.pool import Pool
from isthmus.plan.memory.plan_stage_memory import stage_degrees
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import Calibration, FittedParameter
from isthmus.plan.time.stage_costs import StageCost, stage_costs
from isthmus.plan.time.stage_time import MicroBatchShape, host_update_s, stage_pass_time, update_s
from isthmus.sim import StageLoad
from tests.plan.hand import model_of, plan_of
from tests.plan.round_numbers import calibration_of

PROFILE = profile_model(model_of())
LAYER = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 8192 + 2 * 2048
ENDS = 32000 * 2048
FIRST, LAST = 4 * LAYER + ENDS, 4 * LAYER + ENDS + 2048
"""Parameters of the two stages of a model of 8 layers: with the embedding, with final norm and head."""

BOUNDARY = 2048 * 2048 * 2
"""Bytes of the hidden states of 2,048 tokens in two bytes."""

RATES = calibration_of(
    matmul_share=1.0, attention_share=1.0, memory_share=1.0, link_share=1.0, network_share=1.0, step_s=0.125,
    link_latency_s=1e-3, network_latency_s=2e-3, launch_s=1e-12, skew_s=1e-12,
)  # fmt: skip


def pool_of(library: str = "gloo", **more: float) -> Pool:
    """A cluster of two groups of the same chips, whose networks differ by ten."""
    chip = {
        "name": "round", "peak_flop_per_s": {"bf16": 1e14}, "memory_bytes": 80 * 10**9, "collective_library": library,
        "memory_bandwidth_bytes_per_s": 1e12, "in_node_link": {"name": "x", "bandwidth_bytes_per_s": 1e11},
    } | more  # fmt: skip
    groups = [
        {"name": name, "chip": "round", "nodes": 8, "chips_per_node": 8, "network_gbps": gbps}
        for name, gbps in (("g", 80), ("slow", 8))
    ]
    clusters = [{"name": name, "owner": "o", "node_groups": groups} for name in "ab"]
    return Pool.model_validate({"chips": [chip], "clusters": clusters})


def costs(plan: Plan, pool: Pool | None = None, calibration: Calibration = RATES) -> tuple[StageCost, ...]:
    """The costs of the first replica's stages."""
    return stage_costs(plan, pool or pool_of(), PROFILE, calibration)


def load(plan: Plan, index: int = 0, pool: Pool | None = None) -> StageLoad:
    """What the simulator takes of a stage."""
    return costs(plan, pool)[index].load


@pytest.mark.parametrize(("tp", "dp", "near"), [(1, 4, True), (1, 5, False), (2, 2, True), (2, 3, False), (4, 1, True)])
def test_a_message_stays_in_a_node_that_holds_two_stages_of_all_replicas(tp: int, dp: int, near: bool) -> None:
    """2 x chips x replicas of 8; each chip sends its part over the link, or over the network."""
    seconds = 1e-3 + BOUNDARY / tp / 1e11 if near else 2e-3 + BOUNDARY / tp / 1e10
    one, last = costs(plan_of(clusters="aa", tp=tp, dp=dp))
    assert (one.load.hop_s, last.load.hop_s) == pytest.approx((seconds, seconds))
    assert load(plan_of(clusters="ab", tp=tp, dp=dp)).hop_s == pytest.approx(seconds)


def test_a_message_to_another_group_takes_the_slower_network_and_the_cards_of_fewer_chips() -> None:
    """4 chips to 2: two parts at 1e9 bytes a second, in either direction."""
    for first, second in (("g", "slow"), ("slow", "g")):
        stages = (
            Stage(cluster="a", node_group=first, layers=(0, 4), tp=4),
            Stage(cluster="a", node_group=second, layers=(4, 8), tp=2),
        )
        one = load(Plan(id="p", stages=stages, micro_batches=8, micro_batch_size=1, sequence_length=2048))
        assert one.hop_s == pytest.approx(2e-3 + BOUNDARY / 2 / 1e9)


def test_the_bytes_of_a_message_are_those_of_the_hidden_states() -> None:
    """Of all samples of a micro-batch, in the bytes of the precision."""
    assert load(plan_of(micro_batch_size=3)).boundary_bytes == 3 * BOUNDARY
    assert load(plan_of(precision="fp32")).boundary_bytes == 2 * BOUNDARY
    assert load(plan_of(dp=2, micro_batch_size=3, replica_micro_batch_sizes=(2, 3))).boundary_bytes == 2 * BOUNDARY


def test_passes_are_those_of_the_layers_and_their_recomputation() -> None:
    """Of the plan's precision, documents and schedule; layers and cluster are named."""
    plan = plan_of(clusters="ab", recompute="full", recompute_layers=2, packed_tokens=512, precision="fp32")
    batch = MicroBatchShape(micro_batch_size=1, sequence_length=2048, precision="fp32", packed_tokens=512)
    for cost, layers in zip(costs(plan), ((0, 4), (4, 8)), strict=True):
        degrees = stage_degrees(plan, cost.stage)
        whole = stage_pass_time(PROFILE, layers, cost.chip_model, batch, degrees, recompute="full", recompute_layers=2)
        assert (cost.load.forward_s, cost.load.backward_s) == pytest.approx((whole.forward_s, whole.backward_s))
        assert (cost.load.cluster, cost.load.layers, cost.time) == (cost.stage.cluster, layers, whole)
        assert cost.stack.name == "isthmus"


@pytest.mark.parametrize(
    ("fields", "parameters", "each"),
    [({}, FIRST, 36), ({"precision": "fp32"}, FIRST, 28), ({"dp": 4, "zero": 1}, FIRST / 4, 36),
     ({"dp": 4, "zero": 3}, FIRST / 4, 36), ({"dp": 4}, FIRST, 36)],
)  # fmt: skip
def test_an_update_takes_the_parameters_of_a_chip(fields: dict[str, object], parameters: float, each: int) -> None:
    """After ZeRO has dealt them out, and the fixed time of a step; on the host over its link."""
    plan = plan_of(clusters="aa", **fields)
    one = costs(plan)[0]
    assert one.load.update_s == pytest.approx(0.125 + parameters * each / 1e12)
    assert one.load.update_s == pytest.approx(0.125 + update_s(one.chip_model, parameters, 4 if each == 28 else 2))
    host = costs(plan.model_copy(update={"optimizer_on_host": True}))[0]
    own = host_update_s(one.chip_model.chip, parameters, 4 if each == 28 else 2)
    assert host.load.update_s == pytest.approx(0.125 + own)


def test_stages_of_a_cluster_share_what_sums_their_gradients() -> None:
    """Three of four stages are in `a`: a third of 24 Gbit/s of its server each."""
    clusters = [
        one.model_copy(update={"aggregators": ({"kind": "server", "network_gbps": 24.0},)})
        for one in pool_of().clusters
    ]
    pool = Pool.model_validate(pool_of().model_dump(by_alias=True) | {"clusters": [dict(one) for one in clusters]})
    for index, rate in ((0, 1e9), (3, 3e9)):
        servers = load(plan_of(clusters="aaab", dp=2), index, pool).servers
        assert servers is not None
        ((kind, one),) = servers.with_aggregators
        assert (servers.place, kind, one.server_bytes_per_s) == (f"cluster '{'aaab'[index]}'", "server", rate)


def test_memory_follows_the_measured_factor_and_what_lies_outside() -> None:
    """Activations double, and what fragments lose with all; 5 % of the device is kept free, or what was measured."""
    plain = costs(plan_of())[0]
    doubled = costs(plan_of(), calibration=RATES.with_values({"activation_memory": 2.0}))[0]
    assert doubled.memory.activations_bytes == 2 * plain.memory.activations_bytes
    assert doubled.memory.static_bytes == plain.memory.static_bytes
    share = plain.memory.reserve_bytes / plain.memory.allocated_bytes
    assert doubled.memory.reserve_bytes == pytest.approx(share * doubled.memory.allocated_bytes)
    assert (plain.memory_limit_bytes, plain.device_bytes) == (pytest.approx(0.95 * 80e9), 80e9)
    for outside, limit in ((5e9, 75e9), (90e9, 0.0)):
        measured = costs(plan_of(), calibration=RATES.with_values({"round/outside_memory_bytes": outside}))[0]
        assert measured.memory_limit_bytes == limit
    reserved = plain.memory.total_bytes / plain.memory.allocated_bytes
    assert plain.load.static_bytes == pytest.approx(reserved * (plain.memory.static_bytes + plain.memory.buffers_bytes))
    assert plain.load.activation_bytes == pytest.approx(reserved * plain.memory.activations_bytes)
    room = 0.95 * 80e9 - plain.load.static_bytes
    assert plain.max_in_flight == int(room / plain.load.activation_bytes)


def test_the_doubt_of_a_peak_is_that_of_its_activations_and_of_the_rest() -> None:
    """By the share of activations, in squares."""
    known = RATES.model_copy(
        update={"parameters": RATES.parameters | {"round/activation_memory": FittedParameter(value=1.0, relative=0.4)},
                "memory_residual": 0.3}
    )  # fmt: skip
    cost = costs(plan_of(), calibration=known)[0]
    share = cost.memory.activations_bytes / cost.memory.allocated_bytes
    assert cost.memory_uncertainty(cost.memory) == pytest.approx(math.hypot(0.4 * share, 0.3))


@pytest.mark.parametrize(("layers", "overlap"), [(None, True), (None, False), (3, False)])
def test_offloaded_activations_cross_the_link_beside_the_pass_or_after_it(layers: int | None, overlap: bool) -> None:
    """Those of the first layers; of one that is recomputed its input alone; 25.1 GB/s."""
    offload = ActivationOffload(layers=layers, overlap=overlap)
    one, plain = (
        costs(plan_of(clusters="ab", recompute="full", recompute_layers=1, offload=each))[0] for each in (offload, None)
    )
    kept = PROFILE.layers[0].activation_bytes(2048, 2048, 2)
    moved_s = (BOUNDARY + ((layers or 4) - 1) * kept) / 25.1e9
    for name in ("forward_s", "backward_s"):
        own = getattr(plain.load, name)
        assert getattr(one.load, name) == pytest.approx(max(own, moved_s) if overlap else own + moved_s)
    all_s = costs(plan_of(clusters="ab", recompute="full", offload=ActivationOffload(overlap=False)))[0].load.forward_s
    assert all_s - plain.load.forward_s == pytest.approx(4 * BOUNDARY / 25.1e9)
