"""Words of a plan beside its degrees: bytes and seconds of each, by hand or by the formula of its source."""

from __future__ import annotations

import math
from math import comb

import pytest

from isthmus.core.chip import Precision, chip_catalogue
from isthmus.core.errors import ModelError
from isthmus.core.plan import Plan
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.core.plan_parts.expert_exchange import ExpertExchange
from isthmus.core.plan_parts.kernel_choice import KernelChoice
from isthmus.core.plan_parts.shard_group import ShardGroup
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.core.pool import NodeGroup
from isthmus.core.stack import find_stack
from isthmus.plan import DATA_SHEET, predict, profile_model, stacked_profile
from isthmus.plan.memory.backward_peak import MicroBatchLoad
from isthmus.plan.memory.exchange_buffers import exchange_buffer_bytes
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import stage_memory, state_bytes
from isthmus.plan.profile.chosen_stack import chosen_stack
from isthmus.plan.profile.mean_places import Routing, mean_places
from isthmus.plan.profile.planned_profile import planned_profile
from isthmus.plan.profile.recompute_modules import module_profile
from isthmus.plan.time.collectives import Topology, node_all_to_all_s
from isthmus.plan.time.layer_exchanges import ChipMicroBatch, CollectiveCall, layer_exchanges
from isthmus.plan.time.replica_reduction import ReplicaPlace, hybrid_gather_s, hybrid_reduce_s
from isthmus.plan.time.stage_costs import stage_costs
from isthmus.plan.time.stage_time import HOST_LINK_BYTES_PER_S, collective_call_s, hidden_part_s, host_link_bytes_per_s
from isthmus.plan.time.stage_work import layer_work
from tests.plan.hand import model_of, plan_of, pool_of
from tests.plan.published import published

HIDDEN, HEADS, KV, FFN, VOCABULARY, LAYERS = 2048, 16, 1024, 8192, 32000, 8
TOKENS = 2048
MODEL = model_of()
PROFILE = profile_model(MODEL)
FAST = Topology(
    chips_per_node=8, link_bytes_per_s=1e11, link_latency_s=0.0, network_bytes_per_s=1e10, network_latency_s=0.0
)


def layer_bytes(plan: Plan, recompute: str = "none", each: int = 2) -> float:
    """The activations of one layer per token as `plan` keeps them."""
    layer = planned_profile(PROFILE, plan).layers[0]
    return layer.activation_bytes(TOKENS, TOKENS, each, recompute) / TOKENS


def one_stage(**fields: object) -> Plan:
    return plan_of(clusters="a", **fields)


def loads(**fields: object):
    """The simulator's load of the only stage of a plan on H100s."""
    return stage_costs(one_stage(**fields), pool_of("H100"), PROFILE, DATA_SHEET)[0].load


# --- recomputation by module


@pytest.mark.parametrize(
    ("modules", "dropped"),
    [
        (("core_attn",), 4 * HEADS),
        (("layernorm",), 2 * (HIDDEN + HIDDEN)),
        (("mlp",), 2 * (2 * FFN + FFN)),
        (("core_attn", "mlp"), 4 * HEADS + 2 * (2 * FFN + FFN)),
    ],
)
def test_each_module_drops_its_tensors(modules, dropped):
    """Megatron keeps of a layer: norms' inputs and outputs, q, k, v, the result, SwiGLU's input and output, logsumexp.

    `layernorm` drops two outputs of the hidden size, `mlp` the two products' results and the last product's input.
    """
    plan = one_stage(stack="megatron")
    profile = module_profile(planned_profile(PROFILE, plan), modules)
    kept = profile.layers[0].activation_bytes(TOKENS, TOKENS, 2, "selective") / TOKENS
    assert layer_bytes(plan) - kept == dropped


def test_experts_are_dropped_whole_or_their_activation_alone():
    """DeepSeek-V3's experts: `moe` keeps the block's input, `moe_act` drops the last products' input."""
    profile = stacked_profile(profile_model(published("deepseek-v3")), "megatron", "bf16")
    layer = profile.layers[-1]
    block = layer.feed_forward

    def kept(*modules: str) -> float:
        chosen = module_profile(profile, modules).layers[-1].feed_forward
        return chosen.activation_bytes(1.0, 4096, 2, "selective")

    assert kept("moe") == 2 * 7168
    assert block.activation_bytes(1.0, 4096, 2) - kept("moe_act") == 2 * 8 * 2048
    assert block.activation_bytes(1.0, 4096, 2) - kept("shared_experts") == 2 * 3 * 2048
    latent = module_profile(profile, ("mla_up_proj",)).layers[-1].attention
    dropped = layer.attention.activation_bytes(1.0, 4096, 2) - latent.activation_bytes(1.0, 4096, 2, "selective")
    assert dropped == 2 * 128 * (192 + 192 + 256), "q, k and the tensor of which v is a view"


def test_a_module_repeats_its_products_in_the_backward_pass():
    """`mlp` repeats three of a layer's seven products, `core_attn` the core, `layernorm` only moves bytes."""
    none = loads(stack="megatron")
    base = {"stack": "megatron", "recompute": "selective"}
    parts = {name: loads(**base, recompute_modules=(name,)) for name in ("core_attn", "layernorm", "mlp")}
    assert {one.forward_s for one in parts.values()} == {none.forward_s}
    extra = {name: one.backward_s - none.backward_s for name, one in parts.items()}
    assert 0 < extra["layernorm"] < extra["core_attn"] < extra["mlp"]
    flops = LAYERS * 2 * TOKENS * 3 * HIDDEN * FFN
    assert extra["mlp"] > flops / 989e12, "no faster than the peak of an H100"


# --- offload of activations


def test_offload_leaves_two_layers_on_the_chip():
    """Eight equal layers: all of their activations leave, two are on the way at a time."""
    common = {"is_first": True, "is_last": True, "micro_batch_size": 1, "sequence_length": TOKENS, "in_flight": 4}
    plain = stage_memory(PROFILE, (0, LAYERS), **common)
    moved = stage_memory(PROFILE, (0, LAYERS), offload=ActivationOffload(), **common)
    each = PROFILE.layers[0].activation_bytes(TOKENS, TOKENS, 2)
    assert plain.activations_bytes - moved.activations_bytes == 4 * LAYERS * each
    assert moved.buffers_bytes - plain.buffers_bytes == 2 * each
    some = stage_memory(PROFILE, (0, LAYERS), offload=ActivationOffload(layers=3), **common)
    assert plain.activations_bytes - some.activations_bytes == 4 * 3 * each


def test_a_chip_without_a_rate_to_its_host_has_that_of_pcie_4():
    """What an A100 reached counts for V100; an H100 states its own."""
    chips = chip_catalogue()
    assert host_link_bytes_per_s(chips["V100"]) == HOST_LINK_BYTES_PER_S == pytest.approx(25.13e9, rel=0.01)
    assert host_link_bytes_per_s(chips["H100"]) == 35.2e9


def test_offload_takes_the_link_to_the_host_beside_or_after_the_pass():
    """The layers' bytes over the host link, forward and backward; overlapped, the slower of the two counts."""
    moved_s = LAYERS * PROFILE.layers[0].activation_bytes(TOKENS, TOKENS, 2) / 35.2e9
    plain = loads()
    beside, after = (loads(offload={"overlap": overlap}) for overlap in (True, False))
    assert beside.forward_s == pytest.approx(max(plain.forward_s, moved_s))
    assert after.forward_s == pytest.approx(plain.forward_s + moved_s)
    assert after.backward_s == pytest.approx(plain.backward_s + moved_s)


# --- context parallelism


@pytest.mark.parametrize(
    ("kind", "sent", "backward", "buffer"),
    [
        ("gather", [TOKENS * 2 * KV * 2], 2.0, TOKENS * 2 * KV * 2),
        ("ring", [TOKENS // 4 * 2 * KV * 2], 2.0, 2 * TOKENS // 4 * 2 * KV * 2),
        (
            "all_to_all",
            [TOKENS // 4 * (HIDDEN + 2 * KV) * 2, TOKENS // 4 * HIDDEN * 2],
            1.0,
            TOKENS // 4 * (2 * HIDDEN + 2 * KV) * 2,
        ),
    ],
)
def test_kinds_of_context_parallelism_send_and_hold_their_bytes(kind, sent, backward, buffer):
    """A sequence over four chips: keys and values gathered; a block of them passed on; query, key, value and result.

    H. Liu et al., Ring Attention, 2023; S. Jacobs et al., DeepSpeed Ulysses, 2023, section 3.2.
    """
    degrees = StageDegrees(cp=4, cp_kind=kind)
    batch = ChipMicroBatch(tokens=TOKENS / 4, sequence_length=TOKENS, precision_bytes=2, degrees=degrees)
    calls = list(layer_exchanges(PROFILE.layers[0], batch))
    assert [call.num_bytes for call in calls] == sent
    assert {call.backward_ratio for call in calls} == {backward}
    load = MicroBatchLoad(tokens=TOKENS / 4, sequence_length=TOKENS, precision_bytes=2)
    assert exchange_buffer_bytes(PROFILE.layers[0], degrees, load) == buffer


def test_a_ring_hides_all_steps_that_the_core_outlasts():
    """Of p steps of the core p - 1 have a message beside them."""
    call = CollectiveCall(kind="ring", num_bytes=1.0, size=4, behind="core")
    assert hidden_part_s(call, 1.0, matmul_s=9.0, core_s=0.8) == pytest.approx(0.6)
    assert hidden_part_s(call, 0.1, matmul_s=0.0, core_s=0.8) == 0.1


def test_a_long_sequence_is_faster_in_a_ring_than_gathered():
    """At 64 K tokens the core hides the ring's steps; all-to-all sends least but hides nothing."""
    times = {
        kind: loads(cp=4, cp_kind=kind, sequence_length=65536).forward_s for kind in ("gather", "ring", "all_to_all")
    }
    assert times["ring"] < times["all_to_all"]
    assert times["ring"] < times["gather"]


@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_unlike_chips_share_a_sequence_by_their_rates(kind):
    """Two chips, one of half the rate: the time of 1.5 chips, and the faster one holds two thirds of the tokens."""
    equal, unlike = ({"cp": 2, "cp_kind": kind, "cp_rates": rates} for rates in ((1.0, 1.0), (1.0, 0.5)))
    assert loads(**equal) == loads(cp=2, cp_kind=kind)
    alone, two, three_halves = loads(), loads(**equal), loads(**unlike)
    assert two.forward_s < three_halves.forward_s < alone.forward_s
    assert two.activation_bytes < three_halves.activation_bytes < alone.activation_bytes
    assert three_halves.activation_bytes / alone.activation_bytes == pytest.approx(2 / 3, rel=0.05)
    whole = ChipMicroBatch(
        tokens=TOKENS / 1.5, sequence_length=TOKENS, precision_bytes=2, degrees=StageDegrees(cp=2, cp_rates=(1.0, 0.5))
    )
    (call,) = (one for one in layer_exchanges(PROFILE.layers[0], whole) if one.kind == "all_gather")
    assert call.num_bytes == TOKENS * 2 * KV * 2


# --- experts


def test_a_token_reaches_the_hypergeometric_number_of_nodes():
    """8 of 256 experts over 8 nodes: 8 (1 - C(224, 8) / C(256, 8)) nodes; over 256 places each expert its own."""
    free = Routing(experts=256, chosen=8)
    assert mean_places(8, free) == pytest.approx(8 * (1 - comb(224, 8) / comb(256, 8)))
    assert mean_places(256, free) == pytest.approx(8)
    assert mean_places(1, free) == 1


def test_a_router_limited_to_groups_reaches_at_most_their_nodes():
    """DeepSeek-V3: 8 of 256 experts, of 4 of 8 groups. A group a node: 4 (1 - C(96, 8) / C(128, 8)) nodes; chips of 4
    experts: 64 x 4/8 x (1 - C(124, 8) / C(128, 8)); two groups a node, three or none of both: by hand.
    """
    limited = Routing(experts=256, chosen=8, groups=8, chosen_groups=4)
    assert mean_places(8, limited) == pytest.approx(4 * (1 - comb(96, 8) / comb(128, 8)))
    assert mean_places(64, limited) == pytest.approx(32 * (1 - comb(124, 8) / comb(128, 8)))
    assert mean_places(256, limited) == pytest.approx(8)
    none, one = comb(6, 4) / comb(8, 4), 2 * comb(6, 3) / comb(8, 4)
    both = 1 - none - one
    missed = none + one * comb(96, 8) / comb(128, 8) + both * comb(64, 8) / comb(128, 8)
    assert mean_places(4, limited) == pytest.approx(4 * (1 - missed))
    every = Routing(experts=256, chosen=8, groups=8, chosen_groups=8)
    for places in (2, 4, 8, 16, 64):
        assert mean_places(places, every) == pytest.approx(mean_places(places, Routing(experts=256, chosen=8)))


def test_a_model_states_the_limit_of_its_router():
    """DeepSeek-V3's `n_group` and `topk_group` shorten its exchange; groups that hold too few experts are refused."""
    model = published("deepseek-v3")
    free = model.model_copy(update={"config": {**model.config, "topk_group": 8}})
    batch = ChipMicroBatch(
        tokens=TOKENS, sequence_length=TOKENS, precision_bytes=2,
        degrees=StageDegrees(ep=64, experts=ExpertExchange(dispatcher="deepep")),
    )  # fmt: skip
    limited_s, free_s = (
        collective_call_s(FAST, next(layer_exchanges(profile_model(one).layers[-1], batch))) for one in (model, free)
    )
    nodes = 4 * (1 - comb(96, 8) / comb(128, 8)), 8 * (1 - comb(224, 8) / comb(256, 8))
    assert limited_s / free_s == pytest.approx(nodes[0] / nodes[1], rel=1e-3)
    for field, value in (("n_group", 7), ("n_group", 0), ("topk_group", 9), ("topk_group", -1)):
        with pytest.raises(ModelError, match=field):
            profile_model(model.model_copy(update={"config": {**model.config, field: value}}))


def test_deepep_sends_a_token_once_to_each_node():
    """64 chips in 8 nodes: mean nodes x 7/8 over the network, against 8 x 56/64 copies of an all-to-all."""
    free = Routing(experts=256, chosen=8)
    seconds = node_all_to_all_s(FAST, 1e9, 64, 1, free)
    nodes = 8 * (1 - comb(224, 8) / comb(256, 8))
    assert seconds == pytest.approx(max(nodes * 7 / 8 * 1e9 / 1e10, mean_places(64, free) * 7 / 8 * 1e9 / 1e11))


def test_dispatchers_send_their_copies():
    """Mixtral, ep 8: two copies of a token each way; every token to all; one copy for each node."""
    profile = profile_model(published("mixtral-8x7b"))
    own = TOKENS * 4096 * 2

    def calls(**fields: object) -> list[CollectiveCall]:
        batch = ChipMicroBatch(
            tokens=TOKENS, sequence_length=TOKENS, precision_bytes=2, degrees=StageDegrees(ep=8, **fields)
        )
        return list(layer_exchanges(profile.layers[0], batch))

    assert [(one.kind, one.num_bytes, one.num_calls) for one in calls()] == [("all_to_all", 2 * own, 2.0)]
    gathered = calls(experts=ExpertExchange(dispatcher="all_gather"))
    assert [(one.kind, one.num_bytes) for one in gathered] == [("all_gather", 8 * own)]
    nodes = calls(experts=ExpertExchange(dispatcher="deepep"), narrow_dispatch=True)
    assert [(one.kind, one.num_bytes) for one in nodes] == [("node_all_to_all", own)]
    assert nodes[0].num_calls == 1 + (1 + 4 / 128) / 2, "8 bits and a scale of 4 bytes for 128 elements, one way"


def test_an_overlapped_exchange_hides_behind_the_pass():
    """As in DualPipe: the exchange runs beside another micro-batch's products."""
    model, pool = published("mixtral-8x7b"), pool_of("H100")
    plans = [plan_of(32, "a", ep=8, dp=8, experts=experts, micro_batches=1) for experts in (None, {"overlap": True})]
    exposed, hidden = (stage_costs(one, pool, profile_model(model), DATA_SHEET)[0].load for one in plans)
    assert hidden.forward_s < exposed.forward_s
    assert hidden.backward_s < exposed.backward_s


# --- dropout


def test_dropout_keeps_the_masks_of_a_published_count():
    """A GPT of Megatron-LM: 34 s b h + 5 a s^2 b bytes a layer with dropout, 32 and 2 without (Korthikanti et al.,
    section 4.1); selective recomputation keeps no scores; fused attention adds the two masks of hidden states alone.
    """
    hidden, heads, tokens = 1600, 25, 1024
    profile = profile_model(published("gpt2-xl"))

    def per_token(recompute: str = "none", **kernels: object) -> float:
        plan = plan_of(
            48, "a", stack="megatron", micro_batch_size=1, sequence_length=tokens, kernels=KernelChoice(**kernels)
        )
        layer = planned_profile(profile, plan).layers[0]
        statistics = 2 * 2 * 4
        return layer.activation_bytes(tokens, tokens, 2, recompute) / tokens - statistics

    assert per_token(attention="eager", dropout=True) == pytest.approx(34 * hidden + 5 * heads * tokens)
    assert per_token(attention="eager") == pytest.approx(32 * hidden + 2 * heads * tokens)
    assert per_token("selective", attention="eager", dropout=True) == pytest.approx(34 * hidden)
    assert per_token(dropout=True) - per_token() == pytest.approx(2 * hidden)
    assert per_token("full", dropout=True) == per_token("full"), "the input of the layer alone"


def test_masks_are_written_and_read():
    """Megatron-LM's traffic follows what it keeps; a stack that counts by operator adds a byte an element each way."""
    profile, size = profile_model(published("gpt2-xl")), 1600 * 1024
    for stack in ("megatron", "deepspeed"):
        plans = [
            plan_of(48, "a", stack=stack, micro_batch_size=1, sequence_length=1024, kernels=KernelChoice(dropout=drop))
            for drop in (False, True)
        ]
        batch = ChipMicroBatch(tokens=1024, sequence_length=1024, precision_bytes=2, degrees=StageDegrees())
        without, dropped = (layer_work(planned_profile(profile, plan).layers[0], batch) for plan in plans)
        ratio = find_stack(stack).traffic_ratio if stack == "megatron" else 0.5
        assert dropped.moved_bytes - without.moved_bytes == pytest.approx(2 * 2 * size * ratio)
        assert dropped.moved_back_bytes - without.moved_back_bytes >= 2 * size


# --- sharding groups


def test_hybrid_sharding_keeps_the_state_of_a_group():
    """64 replicas in groups of 8: state over 8, not 64 (Zhao et al., PyTorch FSDP, VLDB 2023, 3.2.2)."""

    def static(**fields: object) -> float:
        degrees = StageDegrees(dp=64, zero=3, **fields)
        return stage_memory(
            PROFILE, (0, LAYERS), is_first=True, is_last=True, micro_batch_size=1, sequence_length=TOKENS,
            in_flight=1, degrees=degrees,
        ).static_bytes  # fmt: skip

    whole = 18 * PROFILE.num_parameters
    assert static() == pytest.approx(whole / 64)
    assert static(shard_replicas=8) == pytest.approx(whole / 8)


def test_hybrid_reduction_crosses_nodes_with_one_eighth():
    """1 GB over 8 nodes of 8: 7/8 over links, an all-reduce of 1/8 over the network, weights back over links."""
    places = [ReplicaPlace(topology=FAST, count=64, num_chips=1)]
    inside = 7 * 4e-6 + 7 / 8 * 1e9 / 1e11
    assert hybrid_gather_s(places, 8, 1e9) == pytest.approx(inside)
    between = min(14 * 8e-6 + 14 / 8 * 1.25e8 / 1e10, 6 * 8e-6 + 2 * 1.25e8 / 1e10)
    assert hybrid_reduce_s(places, 8, 1e9, 0.0) == pytest.approx(inside + between)
    assert hybrid_reduce_s(places, 8, 1e9, 5e8) == pytest.approx(inside + between + 7 * 4e-6 + 7 / 8 * 5e8 / 1e11)


def test_weights_that_stay_gathered_cost_memory_and_save_a_gather():
    """Without resharding a stage's weights are whole beside their shard, and no pass waits for a gather."""
    kept = [loads(dp=64, zero=3, sharding={"reshard": reshard}) for reshard in (True, False)]
    layer, head = PROFILE.layers[0].parameters, PROFILE.head.parameters + HIDDEN
    most = layer + max(layer, head)
    assert kept[1].static_bytes - kept[0].static_bytes == pytest.approx(2 * (PROFILE.num_parameters - most) * 1.04), (
        "all weights but the two neighbours that are gathered anyway, with the allocator's share"
    )
    assert kept[1].forward_s <= kept[0].forward_s
    assert kept[1].gradient_bytes == pytest.approx(1.5 * kept[0].gradient_bytes), "gradients, and one gather a step"


# --- kernels


def test_fused_norms_keep_their_input_in_its_own_precision():
    """Two norms a layer: 4 bytes of an fp32 copy and 2 of a scaled one become 2."""
    plain, fused = layer_bytes(one_stage()), layer_bytes(one_stage(kernels={"norms": "fused"}))
    assert plain - fused == 2 * (4 + 2 - 2) * HIDDEN


def test_compiled_layers_keep_no_element_wise_result():
    """In addition the activation between the products of SwiGLU is computed again."""
    fused = layer_bytes(one_stage(kernels={"norms": "fused"}))
    assert fused - layer_bytes(one_stage(kernels={"compiled": True})) == 2 * FFN


@pytest.mark.parametrize(("loss", "kept", "peak"), [(None, 4, None), ("fused", 2, 0.0), ("linear", 0, 2.0)])
def test_losses_keep_their_logits(loss, kept, peak):
    """fp32 log-probabilities; the gradient in place of the logits; no logits, in 16 chunks (32000 over 2048)."""
    profile = planned_profile(PROFILE, one_stage(kernels={"loss": loss}))
    assert profile.head.activation_bytes(1.0, TOKENS, 2) == 2 * HIDDEN + kept * VOCABULARY + 8
    assert profile.stack.loss.peak_bytes == peak
    assert profile.stack.loss.chunks == (16 if loss == "linear" else 1)


def test_eager_attention_keeps_the_scores():
    """Softmax in fp32 and its copy in 16 bits for every key, instead of a logsumexp a head; keys repeated per head."""
    fused, eager = layer_bytes(one_stage()), layer_bytes(one_stage(kernels={"attention": "eager"}))
    repeated = 2 * (2 * HIDDEN - 2 * KV)
    assert eager - fused == HEADS * TOKENS * (4 + 2) - 4 * HEADS + repeated
    assert chosen_stack(one_stage(kernels={"attention": "flash3"})).attention_kernel == "flash3"


# --- formats


@pytest.mark.parametrize(("precision", "each"), [("fp8", 1.0), ("mxfp8", 33 / 32), ("nvfp4", 9 / 16)])
def test_narrow_products_keep_their_inputs_with_scales(precision: Precision, each: float):
    """MXFP8: 8 bits and a scale for 32 elements; NVFP4: 4 bits and a scale for 16. Weights are cached twice."""
    plan = one_stage(stack="megatron", precision=precision)
    wide = layer_bytes(one_stage(stack="megatron"))
    inputs = 2 * HIDDEN + FFN
    assert wide - layer_bytes(plan) == pytest.approx(2 * inputs - each * inputs - each * HIDDEN)
    assert state_bytes(planned_profile(PROFILE, plan), "bf16").weights == pytest.approx(2 + 2 * each)


def test_activations_in_8_bits_halve_the_inputs_of_products():
    """Three inputs a layer, of 16 bits with any precision of products."""
    plan = one_stage(formats={"activations": "fp8"})
    assert layer_bytes(one_stage()) - layer_bytes(plan) == 2 * HIDDEN + FFN


def test_gradients_in_16_bits_halve_their_reduction():
    """And their buffer, where the stack has it in the format of the reduction (Megatron-LM's main_grad)."""
    plain, half = loads(dp=8), loads(dp=8, formats={"gradients": "bf16"})
    assert half.gradient_bytes == pytest.approx(plain.gradient_bytes / 2)
    both = [one_stage(stack="megatron", formats=one) for one in (None, {"gradients": "bf16"})]
    assert [state_bytes(planned_profile(PROFILE, one), "bf16").gradients for one in both] == [4, 2]


def test_gathers_in_8_bits_halve_the_weights_that_are_sent():
    """ZeRO 1: gradients of 4 and weights of 2 bytes become 4 and 1."""
    plain, half = loads(dp=8, zero=1), loads(dp=8, zero=1, formats={"gathers": "fp8"})
    assert half.gradient_bytes / plain.gradient_bytes == pytest.approx((4 + 1) / (4 + 2))


# --- tensor parallelism, packing, domains


def test_overlapped_tensor_exchanges_hide_behind_products():
    """Exposed without a word forward, and in both passes if it is false (Wang et al., ASPLOS 2023)."""
    hidden, plain, none = (loads(tp=8, sp=True, overlap_tp=word) for word in (True, None, False))
    assert hidden.forward_s < plain.forward_s == none.forward_s
    assert hidden.backward_s <= plain.backward_s < none.backward_s
    call = CollectiveCall(kind="all_reduce", num_bytes=1.0, size=8, behind="products")
    assert hidden_part_s(call, 1.0, matmul_s=0.8, core_s=9.0) == pytest.approx(0.7)


def test_packed_documents_attend_within_themselves():
    """A sequence of 64 documents: (l + 1) / 2 keys a token instead of (S + 1) / 2."""

    def core_flops(packed: int | None) -> float:
        batch = ChipMicroBatch(
            tokens=TOKENS, sequence_length=TOKENS, precision_bytes=2, degrees=StageDegrees(), packed_tokens=packed
        )
        return layer_work(PROFILE.layers[0], batch).attention_flops

    assert core_flops(32) == TOKENS * 4 * HIDDEN * 33 / 2
    assert core_flops(None) == TOKENS * 4 * HIDDEN * (TOKENS + 1) / 2


def test_a_domain_of_several_nodes_has_the_links_of_a_node():
    """72 chips in 18 nodes of 4: an exchange of 64 chips stays on the domain's links."""
    times = []
    for domain in (None, 72):
        pool = pool_of("H100", nodes=18, chips_per_node=4, chips_per_domain=domain)
        times.append(stage_costs(one_stage(tp=16), pool, PROFILE, DATA_SHEET)[0].load.forward_s)
    assert times[1] < times[0]
    with pytest.raises(ValueError, match="nearest valid: 8"):
        NodeGroup(chip="H100", name="g", nodes=2, chips_per_node=4, chips_per_domain=9)


def test_every_word_reaches_the_forecast():
    """All words at once: a finite time, bytes by kind for every stage."""
    plan = plan_of(
        clusters="aa", dp=4, zero=3, tp=2, cp=2, cp_kind="ring", stack="torchtitan", recompute="selective",
        recompute_modules=("core_attn", "mlp"), offload={"layers": 1}, overlap_tp=True, packed_tokens=512,
        sharding={"replicas": 2}, kernels={"attention": "flash3", "loss": "linear", "norms": "fused", "compiled": True},
        formats={"activations": "fp8", "gathers": "fp8", "gradients": "bf16"}, precision="fp8",
        lora={"rank": 8, "targets": ["q", "v"]},
    )  # fmt: skip
    forecast = predict(plan, pool_of("H100"), MODEL, DATA_SHEET)
    assert math.isfinite(forecast.iteration_s)
    for stage in forecast.as_dict()["memory"]:
        assert all(stage[kind] >= 0 for kind in ("weights", "gradients", "optimizer", "activations", "buffers"))
    again = Plan.model_validate(plan.as_document())
    assert again == plan


def test_words_that_are_the_default_change_nothing():
    """A plan that states what holds anyway has the time and memory of one that states nothing."""
    stated = one_stage(
        dp=8, zero=1, kernels=KernelChoice(), formats=TensorFormats(gradients="fp32"), sharding=ShardGroup(),
        experts=None,
    )  # fmt: skip
    plain = one_stage(dp=8, zero=1)
    pool = pool_of("H100")
    assert predict(stated, pool, MODEL).iteration_s == predict(plain, pool, MODEL).iteration_s
