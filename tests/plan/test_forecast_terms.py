"""A forecast by hand: what it sums up, what reaches the simulator, utilisation and sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from isthmus.core.plan import Plan, Stage
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.plan import pipeline_bounds, predict, profile_model
from isthmus.plan.profile.component import AttentionCore
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.model_flops import mfu_fraction
from isthmus.plan.time.model_sizes import model_sizes
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.predict import (
    simulate_plan,
    simulated_training,
    with_searched_schedule,
)
from isthmus.plan.time.stage_costs import stage_costs
from isthmus.sim import Interference
from tests.plan.hand import model_of, plan_of, pool_of
from tests.plan.round_numbers import DENSE_LAYER, EXPERT_LAYER, EXPERTS, profile_of

MODEL = model_of()
PROFILE = profile_model(MODEL)


def test_tokens_samples_cards_and_prices_are_counted_by_replica() -> None:
    """(8 x 2 + 4 x 1) samples of 2,048 tokens; 2 x 2 chips of two a card; 36 and 72 an hour and chip."""
    pool = pool_of("BI-V150", "BI-V150", price_per_chip_hour=36.0)
    dear = pool.clusters[1].node_groups[0].model_copy(update={"price_per_chip_hour": 72.0})
    pool = pool.model_copy(
        update={"clusters": (pool.clusters[0], pool.clusters[1].model_copy(update={"node_groups": (dear,)}))}
    )
    plan = plan_of(
        clusters="ab", dp=2, micro_batch_size=2, replica_micro_batches=(8, 4), replica_micro_batch_sizes=(2, 1)
    )
    made = predict(plan, pool, MODEL)
    assert (made.samples, made.tokens, made.num_cards, made.plan) == (20, 20 * 2048, 2.0, plan.id)
    assert made.cost == pytest.approx((2 * 36 + 2 * 72) / 3600 * made.iteration_s)
    assert made.samples_per_s == pytest.approx(20 / made.iteration_s)
    assert made.tgs_tokens_per_card_s == pytest.approx(20 * 2048 / made.iteration_s / 2)
    assert [cost.stage for cost in made.stages] == list(plan.pipeline(0))
    assert made.calibration == "data-sheet"
    assert made.mfu_fraction == pytest.approx(mfu_fraction(plan, pool, PROFILE, "bf16", made.iteration_s))


def test_memory_of_a_forecast_has_the_micro_batches_in_flight() -> None:
    """Of 1F1B two at the first of two stages, one at the last; its band is that of the peak's doubt."""
    made = predict(plan_of(clusters="aa"), pool_of("A100"), MODEL)
    for memory, cost, count in zip(made.memory, made.stages, (2, 1), strict=True):
        assert memory == cost.memory.with_in_flight(count)
    for (low, high), memory, cost in zip(made.memory_bands, made.memory, made.stages, strict=True):
        spread = math.exp(1.645 * cost.memory_uncertainty(memory))
        assert (low, high) == pytest.approx((memory.allocated_bytes / spread, memory.allocated_bytes * spread))
    told = made.as_dict()
    assert [(row["allocated_low"], row["allocated_high"]) for row in told["memory"]] == list(made.memory_bands)
    assert [row["limit"] for row in told["memory"]] == [cost.memory_limit_bytes for cost in made.stages]
    assert [row["chip"] for row in told["memory"]] == [cost.device_bytes for cost in made.stages]


def test_a_forecast_is_written_with_these_keys() -> None:
    """Those that `isthmus simulate --json` prints, with the values of the forecast; links that carried bytes alone."""
    made = predict(plan_of(clusters="ab"), pool_of("A100", "A100", "A100"), MODEL)
    told = made.as_dict()
    assert told == {
        "plan": "by-hand", "iteration_s": made.iteration_s, "iteration_low_s": made.low_s,
        "iteration_high_s": made.high_s, "tgs_tokens_per_card_s": made.tgs_tokens_per_card_s,
        "samples_per_s": made.samples_per_s, "mfu_fraction": made.mfu_fraction, "cost": made.cost,
        "stages": [stage.as_dict() for stage in made.result.stages], "memory": told["memory"],
        "links": [link.as_dict() for link in made.result.links if link.num_bytes],
        "calibration": "data-sheet", "assumptions": list(made.assumptions),
    }  # fmt: skip
    assert len(told["links"]) == 2


def uneven(**fields: object) -> Plan:
    """Two replicas over two clusters, the second with half of the micro-batches."""
    return plan_of(clusters="ab", dp=2, micro_batches=8, replica_micro_batches=(4, 8), **fields)


def test_a_simulation_is_that_of_the_plan_s_words() -> None:
    """Iterations, seed, transport, local steps, traffic and how gradients are summed reach the simulator."""
    pool = pool_of("A100", "A100")
    plan = plan_of(clusters="ab", dp=2, transport="rendezvous")
    traffic = {("a", "b"): Interference(bytes_per_s=7.0)}
    training, first = simulated_training(
        plan, pool, PROFILE, iterations=3, seed=5, interference=traffic, synchronisation="ring"
    )
    assert (training.iterations, training.seed, training.transport) == (3, 5, "rendezvous")
    assert (training.local_steps, training.synchronisation) == (1, "ring")
    assert training.links == simulated_links(plan, pool, DATA_SHEET, traffic)
    assert len(training.replicas) == 2
    assert training.replicas[0] is training.replicas[1]
    assert training.replicas[0].stages == tuple(cost.load for cost in first)
    assert first == stage_costs(plan, pool, PROFILE, DATA_SHEET)
    plain, _ = simulated_training(plan, pool, PROFILE)
    assert (plain.iterations, plain.seed, plain.synchronisation) == (1, 0, None)


def test_all_ways_to_simulate_agree() -> None:
    """Of a model or its profile; the critical path bounds each; details add spans and change no time."""
    pool, plan = pool_of("A100", "A100"), uneven()
    made = predict(plan, pool, MODEL)
    run, costs = simulate_plan(plan, pool, PROFILE)
    assert (run.iteration_s, costs) == (made.iteration_s, made.stages)
    assert predict(plan, pool, PROFILE, details=True).iteration_s == made.iteration_s
    assert predict(plan, pool, PROFILE, details=True).result != made.result
    alone = [pipeline_bounds(plan_of(clusters="ab", micro_batches=count), pool, MODEL) for count in (4, 8)]
    assert pipeline_bounds(uneven(), pool, MODEL).critical_path_s >= alone[1].critical_path_s > alone[0].critical_path_s
    assert with_searched_schedule(plan, pool, MODEL) == with_searched_schedule(plan, pool, PROFILE)


def test_utilisation_is_operations_over_the_peak_of_all_chips() -> None:
    """3 forwards of 40 samples of 10 tokens, over 2 A100 and 4 H20 for 2 s; no time gives none."""
    stages = (
        Stage(cluster="a", node_group="g", layers=(0, 4), tp=2), Stage(cluster="b", node_group="g", layers=(4, 8), tp=4)
    )  # fmt: skip
    plan = Plan(id="p", stages=stages, micro_batches=20, micro_batch_size=2, sequence_length=10)
    pool = pool_of("A100", "H20")
    chips = [pool.chip(pool.node_group(name, "g")) for name in "ab"]
    flops = 3 * PROFILE.forward_flops(10, 400)
    for precision in ("bf16", "fp8"):
        peak = 2 * chips[0].flop_per_s(precision) + 4 * chips[1].flop_per_s(precision)
        assert mfu_fraction(plan, pool, PROFILE, precision, 2.0) == pytest.approx(flops / peak / 2)
    assert mfu_fraction(plan, pool, PROFILE, "bf16", 0.0) == 0.0
    narrow = predict(plan.model_copy(update={"precision": "fp8"}), pool, PROFILE)
    assert narrow.mfu_fraction == pytest.approx(mfu_fraction(plan, pool, PROFILE, "fp8", narrow.iteration_s))


def sizes(profile: ModelProfile) -> tuple[int, int, int, int, bool, bool, int]:
    """What a plan must divide, in order."""
    found = model_sizes(profile)
    return (
        found.num_layers, found.num_heads, found.num_kv_heads, found.num_experts, found.has_latent, found.has_shared,
        found.hidden_size,
    )  # fmt: skip


def test_a_plan_divides_layers_heads_and_experts() -> None:
    """Most experts of a layer; heads of the first layer that has any; none without attention."""
    assert sizes(profile_of(DENSE_LAYER, EXPERT_LAYER)) == (2, 4, 2, 4, False, False, 8)
    blind = replace(DENSE_LAYER, attention=replace(DENSE_LAYER.attention, core=None))
    assert sizes(profile_of(blind)) == (1, 0, 0, 0, False, False, 8)
    core = AttentionCore(num_heads=6, num_kv_heads=3, key_dim=2, value_dim=2)
    six = replace(DENSE_LAYER, attention=replace(DENSE_LAYER.attention, core=core))
    assert sizes(profile_of(blind, six, DENSE_LAYER)) == (3, 6, 3, 0, False, False, 8)
    shared = replace(EXPERT_LAYER, feed_forward=replace(EXPERTS, shared_experts=1))
    latent_weight = replace(DENSE_LAYER.attention.weights[1], name="kv_b")
    latent = replace(DENSE_LAYER, attention=replace(DENSE_LAYER.attention, weights=(latent_weight,)))
    assert sizes(profile_of(DENSE_LAYER, shared, latent)) == (3, 4, 2, 4, True, True, 8)


def test_a_stage_that_keeps_no_activations_has_no_micro_batches_in_flight() -> None:
    """The middle of three, whose activations all move to the host."""
    plan = plan_of(clusters="aaa", layers=9, stack="megatron")
    moved = plan.stages[1].model_copy(update={"offload": ActivationOffload()})
    plan = Plan.model_validate(plan.model_dump() | {"stages": (plan.stages[0], moved, plan.stages[2])})
    made = predict(plan, pool_of("A100"), profile_of(*[DENSE_LAYER] * 9))
    assert made.memory[1].activations_bytes == 0
    assert made.memory[1].buffers_bytes > 0
    assert made.memory[0] == made.stages[0].memory.with_in_flight(3)
