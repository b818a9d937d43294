"""Rules of a training stage's memory."""

import itertools
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import PlanError
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import stage_memory
from isthmus.plan.profile.component import Recompute, Sharding
from isthmus.plan.profile.model_profile import profile_model
from tests.plan.published import NAMES, published


def in_one_piece(profile):
    """Return the profile with a loss that never computes by chunks: memory then grows with every token."""
    loss = profile.stack.loss.model_copy(update={"chunk_bytes": None})
    return replace(profile, stack=profile.stack.model_copy(update={"loss": loss}))


CHUNKED = {name: profile_model(published(name)) for name in NAMES}
PROFILES = {name: in_one_piece(profile) for name, profile in CHUNKED.items()}
any_profile = st.sampled_from(NAMES)
sparse = st.sampled_from(["mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3"])
power = st.sampled_from([1, 2, 4, 8])


def stage(profile, layers=None, **options):
    first, last = layers or (0, profile.num_layers)
    fields = {
        "is_first": first == 0,
        "is_last": last == profile.num_layers,
        "micro_batch_size": 1,
        "sequence_length": 2048,
        "in_flight": 1,
    } | options
    return stage_memory(profile, (first, last), **fields)


@given(any_profile)
def test_a_parameter_costs_16_bytes_in_fp32_and_18_in_bf16(name):
    """fp32: weight, gradient, two moments; bf16: a bf16 copy besides. A tied head is no weight of its own."""
    profile = PROFILES[name]
    count = profile.num_parameters
    fp32, bf16 = stage(profile, precision="fp32"), stage(profile, precision="bf16")
    assert (fp32.weights_bytes, fp32.gradients_bytes, fp32.optimizer_bytes) == (
        4 * count,
        4 * count,
        8 * count,
    )
    assert (bf16.weights_bytes, bf16.gradients_bytes, bf16.optimizer_bytes) == (
        2 * count,
        4 * count,
        12 * count,
    )


@given(any_profile, st.data())
@settings(deadline=None, max_examples=40)
def test_stages_hold_the_whole_model_between_them(name, data):
    """Cut anywhere, the stages' weights add up to the model's, and a tied embedding once more on the last."""
    profile = PROFILES[name]
    cut = data.draw(st.integers(1, profile.num_layers - 1))
    stages = [stage(profile, (0, cut)), stage(profile, (cut, profile.num_layers))]
    again = profile.vocab_size * profile.hidden_size if profile.tied_embeddings else 0
    assert sum(one.weights_bytes for one in stages) == 2 * (profile.num_parameters + again)


@given(any_profile, st.integers(1, 8), st.integers(1, 6), st.integers(1, 6), st.sampled_from(get_args(Recompute)))
@settings(deadline=None, max_examples=40)
def test_memory_grows_with_sequence_batch_and_flight(name, kilo, batch, flight, recompute):
    """More tokens, sequences or micro-batches in flight never need less."""
    profile = PROFILES[name]
    base = {"micro_batch_size": batch, "in_flight": flight, "recompute": recompute}
    small = stage(profile, sequence_length=kilo * 512, **base).total_bytes
    assert stage(profile, sequence_length=kilo * 512 + 512, **base).total_bytes >= small
    assert stage(profile, sequence_length=kilo * 512, **base | {"micro_batch_size": batch + 1}).total_bytes >= small
    assert stage(profile, sequence_length=kilo * 512, **base | {"in_flight": flight + 1}).total_bytes >= small


@given(any_profile, st.integers(1, 16), st.integers(1, 4), power)
@settings(deadline=None, max_examples=40)
def test_a_loss_by_chunks_keeps_no_logits(name, kilo, flight, tp):
    """Beyond 256 MiB of fp32 logits it keeps 4 bytes a token instead of 4 a logit; below it is a loss in one piece."""
    profile, tokens = CHUNKED[name], kilo * 512
    sizes = {"sequence_length": tokens, "in_flight": flight, "tp": tp}
    chunked, whole = stage(profile, **sizes), stage(PROFILES[name], **sizes)
    if -(-profile.vocab_size // tp) * 4 * tokens <= 256 * 2**20:
        assert chunked == whole
    else:
        logits = 4 * tokens * profile.vocab_size / tp
        saved = flight * (logits - 4 * tokens)
        assert chunked.activations_bytes == pytest.approx(whole.activations_bytes - saved)


@given(any_profile, st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_recomputation_keeps_less_the_more_it_repeats(name, flight):
    """full keeps least, none most; selective and moe lie between."""
    profile = PROFILES[name]
    kept = {mode: stage(profile, in_flight=flight, recompute=mode).activations_bytes for mode in get_args(Recompute)}
    assert kept["full"] < kept["selective"] < kept["none"]
    assert kept["full"] < kept["moe"] <= kept["none"]


@given(any_profile, st.integers(1, 8), st.sampled_from(["selective", "full"]))
@settings(deadline=None, max_examples=40)
def test_recomputing_layer_by_layer_goes_from_all_kept_to_all_repeated(name, flight, mode):
    """Algorithm 1's step: each further recomputed layer keeps less; none of them is `empty_section`, all of them is
    `mode`.
    """
    profile = PROFILES[name]
    kept = [
        stage(profile, in_flight=flight, recompute=mode, recompute_layers=count).activations_bytes
        for count in range(profile.num_layers + 1)
    ]
    assert kept[0] == stage(profile, in_flight=flight).activations_bytes
    assert kept[-1] == stage(profile, in_flight=flight, recompute=mode).activations_bytes
    assert all(after < before for before, after in itertools.pairwise(kept))


@given(any_profile, power, power)
@settings(deadline=None, max_examples=40)
def test_tensor_and_context_parallelism_cut_memory_at_best_by_their_degree(name, tp, cp):
    """Static memory lies between 1/tp and all of it; with sequence parallelism kept tensors shrink by tp and
    cp.
    """
    profile = PROFILES[name]
    whole, cut = stage(profile), stage(profile, tp=tp, cp=cp, sp=tp > 1)
    assert whole.static_bytes / tp <= cut.static_bytes * 1.0001
    assert cut.static_bytes <= whole.static_bytes
    assert whole.activations_bytes / (tp * cp) <= cut.activations_bytes * 1.0001
    assert cut.activations_bytes <= whole.activations_bytes / cp * 1.0001


@given(any_profile, power)
def test_zero_deals_out_one_thing_after_the_other(name, dp):
    """ZeRO 1 cuts the optimizer by dp, 2 the gradients too, 3 the weights too; 0 nothing."""
    profile = PROFILES[name]
    parts = [
        (one.optimizer_bytes, one.gradients_bytes, one.weights_bytes)
        for one in (stage(profile, dp=dp, zero=level) for level in (0, 1, 2, 3))
    ]
    whole = parts[0]
    for level in (1, 2, 3):
        cut = [size / dp if index < level else size for index, size in enumerate(whole)]
        assert parts[level] == pytest.approx(cut)


@given(sparse, st.sampled_from([1, 2, 4, 8]), st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_imbalance_goes_from_balanced_to_all_tokens_here(name, ep, imbalance):
    """Routed tokens per token go from experts_per_token to min(experts_per_token, experts here) x ep."""
    profile = PROFILES[name]
    layer = profile.layers[-1]
    block, degrees = layer.feed_forward, StageDegrees(ep=ep)
    low, high = block.experts_per_token, min(block.experts_per_token, -(-block.num_experts // ep)) * ep
    assert degrees.sharding(layer, 0.0).routed_per_token == low
    assert degrees.sharding(layer, 1.0).routed_per_token == high
    assert low <= degrees.sharding(layer, imbalance).routed_per_token <= high
    assert stage(profile, ep=ep, imbalance=1.0).total_bytes >= stage(profile, ep=ep).total_bytes


def test_the_report_s_worst_case_is_as_many_tokens_as_experts():
    """128 experts over 32 chips, 8 a token: 4 experts here, so at worst 4 x 32 = 128 tokens for each."""
    layer = PROFILES["qwen3-235b-a22b"].layers[0]
    assert StageDegrees(ep=32, tp=4).sharding(layer, 1.0).routed_per_token == 128


def test_experts_are_dealt_out_and_cut_only_without_expert_parallelism():
    """With ep experts stay whole and are dealt out; without it they are cut as everything else."""
    block = PROFILES["qwen3-235b-a22b"].layers[0].feed_forward
    one = 3 * 4096 * 1536
    routed = [weight for weight in block.weights if weight.expert]

    def held(**degrees):
        made = StageDegrees(**degrees)
        shard = Sharding(tp=made.tp, ep=made.ep, etp=made.etp)
        return sum(weight.on_chip(shard) for weight in routed)

    assert held(tp=4, ep=32) == 4 * one
    assert held(tp=4) == 128 * one // 4


@given(any_profile, st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_an_optimizer_on_the_host_frees_the_chip_of_it(name, flight):
    """Host-resident state costs the chip nothing, and nothing else grows."""
    profile = PROFILES[name]
    here, host = stage(profile, in_flight=flight), stage(profile, in_flight=flight, optimizer_on_host=True)
    assert host.optimizer_bytes == 0
    assert host.weights_bytes == here.weights_bytes
    assert host.total_bytes < here.total_bytes - 0.99 * here.optimizer_bytes


def test_key_and_value_are_repeated_beyond_their_heads():
    """With more chips than key/value heads each chip still holds one head."""
    attention = PROFILES["qwen3-235b-a22b"].layers[0].attention
    key = next(weight for weight in attention.weights if weight.name == "k")
    assert key.on_chip(Sharding(tp=8)) == key.on_chip(Sharding(tp=4)) == key.matrix_elements // 4


def test_scores_count_only_without_a_fused_kernel():
    """Fused attention keeps tokens x width; without it rows of scores grow with the square of the length."""
    fused = profile_model(published("llama-3.1-8b"), kernel="fused").layers[0].attention
    eager = profile_model(published("llama-3.1-8b"), kernel="eager").layers[0].attention

    def growth(part):
        return part.activation_bytes(8192, 8192, 2) / part.activation_bytes(4096, 4096, 2)

    assert growth(fused) == pytest.approx(2)
    assert growth(eager) > 3.5


@pytest.mark.parametrize("layers", [(0, 0), (3, 2), (0, 33), (-1, 4)])
def test_a_range_without_layers_is_refused(layers):
    """A stage holds layers of its model."""
    with pytest.raises(PlanError, match="of a model of"):
        stage_memory(
            PROFILES["llama-2-7b"],
            layers,
            is_first=True,
            is_last=True,
            micro_batch_size=1,
            sequence_length=8,
            in_flight=1,
        )


def test_a_degree_below_one_is_refused():
    """No parallelism is a degree of 1."""
    with pytest.raises(PlanError, match="tp is 0"):
        stage(PROFILES["llama-2-7b"], tp=0)
