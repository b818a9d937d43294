"""What stacks add to the time and the memory of a layer, by hand: casts, kernels, exchanges, the loss, pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._models import even_plan
from benchmarks._public_run import public_cluster
from isthmus.core.chip import chip_catalogue
from isthmus.core.model import load_model
from isthmus.core.plan_parts.shard_group import ShardGroup
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.core.pool import NodeGroup
from isthmus.core.runs.check_plan_words import word_problems
from isthmus.core.stack import Stack, find_stack
from isthmus.plan.memory.exchange_buffers import exchange_buffer_bytes
from isthmus.plan.memory.memory_limit import reserved_bytes
from isthmus.plan.memory.plan_stage_memory import plan_stage_memory
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import MicroBatchLoad, StageMemory, stage_memory
from isthmus.plan.profile.layer_profile import LayerProfile
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.profile.planned_profile import planned_profile
from isthmus.plan.profile.stack_tensors import stacked_profile
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.layer_exchanges import ChipMicroBatch, layer_exchanges
from isthmus.plan.time.predict import predict
from isthmus.plan.time.stage_costs import beside_s, stage_costs
from isthmus.plan.time.stage_time import ChipModel, collective_call_s, pass_time
from isthmus.plan.time.stage_work import ChipWork, layer_work
from isthmus.sim import StageLoad

LLAMA = profile_model(load_model(Path(__file__).parent / "configs" / "llama-3.1-8b.json"))
HIDDEN, FFN, KV, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 1024, 32, 8, 128256
TOKENS = 8192
RESIDUAL = 2 * 6 * HIDDEN
HOST = ChipModel.of(
    NodeGroup(name="g", chip="A100", nodes=1, chips_per_node=8),
    chip_catalogue()["A100"],
    DATA_SHEET.with_values({"launch_s": 1e-12, "skew_s": 1e-12}),
)


def layer_of(stack: str | Stack, precision: str = "bf16") -> LayerProfile:
    """A decoder layer of Llama 3.1 8B under a stack."""
    return stacked_profile(LLAMA, stack, precision).layers[0]


def batch(**degrees: object) -> ChipMicroBatch:
    """One sequence, in elements of two bytes."""
    return ChipMicroBatch(
        tokens=TOKENS / int(degrees.get("cp", 1)), sequence_length=TOKENS, precision_bytes=2,
        degrees=StageDegrees(**degrees),
    )  # fmt: skip


def per_token(work: ChipWork) -> tuple[float, float]:
    """Bytes that the passes of `work` move per token: forward, backward."""
    return work.moved_bytes / TOKENS, (work.moved_back_bytes or 0.0) / TOKENS


def test_products_of_8_bits_cast_what_they_multiply() -> None:
    """Inputs of three products 4 bytes an element, of the fourth 6; backward 4 of each gradient of a result."""
    plain, narrow = (per_token(layer_work(layer_of("torchtitan", kind), batch())) for kind in ("bf16", "fp8"))
    assert narrow[0] - plain[0] == pytest.approx(4 * (HIDDEN + HIDDEN + FFN) + 6 * HIDDEN)
    assert narrow[1] - plain[1] == pytest.approx(4 * (HIDDEN + 2 * KV + 2 * FFN + 2 * HIDDEN))


def row_scaled_layer() -> LayerProfile:
    """A decoder layer of Llama 3.1 8B in torchtitan whose products of 8 bits have a scale for each row."""
    plan = even_plan(32, tp=1, pp=1, dp=8, micro_batches=1, micro_batch_size=1, sequence_length=TOKENS,
                     stack="torchtitan", precision="fp8", formats=TensorFormats(scales="row"))  # fmt: skip
    return planned_profile(LLAMA, plan).layers[0]


def test_products_with_a_scale_for_each_row_cast_rows_and_columns() -> None:
    """8 bytes an element of an input, 6 where a kernel before reads it; 8 and 6 of gradients; 10 of a weight."""
    plain, rows = (per_token(layer_work(one, batch())) for one in (layer_of("torchtitan"), row_scaled_layer()))
    matrices = (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * FFN) / TOKENS
    assert rows[0] - plain[0] == pytest.approx(3 * (HIDDEN + HIDDEN) + 3 * HIDDEN + 1 * FFN + 3 * matrices)
    inputs, gradients = 5 * (3 * HIDDEN + FFN), 6 * (HIDDEN + 2 * KV + 2 * FFN) + 8 * 2 * HIDDEN
    assert rows[1] - plain[1] == pytest.approx(inputs + gradients + 7 * matrices)


def test_what_is_gathered_before_the_cast_is_cast_whole() -> None:
    """With eight chips of tensor parallelism hidden states are cast by each of them, the rest is divided."""
    degrees = batch(tp=8, sp=True)
    plain, rows = (layer_work(one, degrees).moved_bytes for one in (layer_of("torchtitan"), row_scaled_layer()))
    matrices = (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * FFN) / TOKENS
    assert (rows - plain) / TOKENS == pytest.approx(3 * 2 * HIDDEN + (3 * HIDDEN + FFN + 3 * matrices) / 8)


def test_gathers_of_products_with_a_scale_for_each_row_stay_wide_and_exposed() -> None:
    """16 bits; where a plan overlaps exchanges, only the scatters, half of them, run beside products."""
    (call,) = layer_exchanges(row_scaled_layer(), batch(tp=8, sp=True))
    assert call.num_bytes == next(layer_exchanges(layer_of("torchtitan"), batch(tp=8, sp=True))).num_bytes
    scatters, gathers = layer_exchanges(row_scaled_layer(), batch(tp=8, sp=True, overlap_tp=True))
    assert (scatters.behind, gathers.behind) == ("products", "none")
    assert scatters.num_calls == gathers.num_calls == call.num_calls / 2


@pytest.mark.parametrize(
    ("formats", "gain"), [(TensorFormats(gathers="fp8"), 0.2503), (TensorFormats(scales="row"), 0.1005)]
)
def test_recipes_of_8_bits_gain_about_what_torchao_measured(formats: TensorFormats, gain: float) -> None:
    """Llama 3 8B on 8 H100 of 500 W, FSDP2 (pytorch/ao, docs/source/workflows/training.md): within 6 % of a step."""
    fields = {"micro_batches": 1, "micro_batch_size": 1, "sequence_length": TOKENS, "zero": 3, "stack": "torchtitan"}
    wide, narrow = (
        predict(
            even_plan(32, tp=1, pp=1, dp=8, recompute="selective", **fields, **kind),
            public_cluster("H100-HBM2e", 8, 400.0),
            LLAMA,
        ).iteration_s
        for kind in ({"precision": "bf16"}, {"precision": "fp8", "formats": formats})
    )
    assert wide / narrow == pytest.approx(1 + gain, rel=0.06)


def test_an_exchange_beside_a_pass_takes_multiprocessors_from_it() -> None:
    """15 % of its time is lost to the pass; an exchange that lasts longer sets the time."""
    assert beside_s(1.0, 0.4, 0.15) == pytest.approx(1.06)
    assert beside_s(1.0, 1.05, 0.15) == pytest.approx(1.1575)
    assert beside_s(1.0, 1.2, 0.15) == pytest.approx(1.2)
    assert beside_s(1.0, 0.0, 0.15) == 1.0


def test_gradients_that_are_reduced_behind_a_pass_slow_it() -> None:
    """NCCL's reduction over eight chips takes 15 % of its own time from the backward pass; gloo's takes nothing."""
    chip = chip_catalogue()["A100"]
    pools = [
        public_cluster("A100", 8, 400.0).model_copy(
            update={"chips": (chip.model_copy(update={"name": "A100", "collective_library": library}),)}
        )
        for library in ("nccl", "gloo")
    ]
    plan = even_plan(32, tp=1, pp=1, dp=8, micro_batches=1, micro_batch_size=1, sequence_length=TOKENS,
                     overlap_gradients=True)  # fmt: skip
    slowed, plain = (stage_costs(plan, pool, LLAMA, DATA_SHEET)[0] for pool in pools)
    parameters = 32 * LLAMA.layers[0].parameters + 2 * VOCABULARY * HIDDEN + HIDDEN
    reduce_s = 2 * 7 / 8 * 4 * parameters / slowed.load.local_bytes_per_s
    assert slowed.load.update_s - plain.load.update_s == pytest.approx(0.15 * reduce_s, rel=1e-6)


@pytest.mark.parametrize(("stack", "precision"), [("torchtitan", "bf16"), ("megatron", "fp8")])
def test_scales_of_rows_that_nothing_states_are_refused(stack: str, precision: str) -> None:
    """Products of 16 bits have none, and a stack without `row_scaled` says nothing of their casts."""
    plan = even_plan(32, tp=1, pp=1, dp=8, micro_batches=1, micro_batch_size=1, sequence_length=TOKENS,
                     stack=stack, precision=precision, formats=TensorFormats(scales="row"))  # fmt: skip
    (problem,) = word_problems(plan)
    assert problem.field == "formats.scales"


def test_torch_merges_the_attention_of_each_block_with_kernels_of_its_own() -> None:
    """46 bytes forward and 60 backward an element of the result, for each of three blocks of other chips."""
    for kind, merges in (("gather", 3), ("all_to_all", 0)):
        bare, torch = (
            layer_work(layer_of(stack), batch(cp=4, cp_kind=kind)) for stack in (_without_merges(), "torchtitan")
        )
        elements = merges * HIDDEN * TOKENS / 4
        assert torch.moved_bytes - bare.moved_bytes == pytest.approx(46 * elements)
        assert (torch.moved_back_bytes or 0) - (bare.moved_back_bytes or 0) == pytest.approx(60 * elements)


def _without_merges() -> Stack:
    stack = find_stack("torchtitan")
    exchanges = stack.exchanges.model_copy(update={"merge_forward_bytes": 0.0, "merge_backward_bytes": 0.0})
    return stack.model_copy(update={"name": "bare", "exchanges": exchanges})


def test_a_stack_s_factor_scales_its_passes_alone() -> None:
    """A factor of 1.2 of torchtitan: 1.2 times its passes; those of another stack stay."""
    slower = DATA_SHEET.with_values({"torchtitan/stack_factor": 1.2})
    pool = public_cluster("A100", 8, 400.0)
    for stack, ratio in (("torchtitan", 1.2), ("megatron", 1.0)):
        plan = even_plan(32, tp=1, pp=1, dp=8, micro_batches=1, micro_batch_size=1, sequence_length=TOKENS, stack=stack)
        plain, scaled = (stage_costs(plan, pool, LLAMA, one)[0].load for one in (DATA_SHEET, slower))
        assert scaled.forward_s == pytest.approx(ratio * plain.forward_s)
        assert scaled.backward_s == pytest.approx(ratio * plain.backward_s)


def test_eager_layers_move_every_operator_by_itself() -> None:
    """Two norms of 36 bytes, 20 for each rotated element, 10 for the gate; and two residual additions."""
    forward, backward = per_token(layer_work(layer_of("torchtitan-eager"), batch()))
    assert forward == pytest.approx(2 * 36 * HIDDEN + 20 * (HIDDEN + KV) + 4 * HIDDEN + 10 * FFN + RESIDUAL)
    assert backward == pytest.approx(2 * 72 * HIDDEN + 20 * (HIDDEN + KV) + 4 * HIDDEN + 18 * FFN + 2 * RESIDUAL)


def test_rules_divide_their_tensors_as_the_chips_do() -> None:
    """With tensor and sequence parallelism over eight chips each moves an eighth."""
    one, eight = (layer_work(layer_of("torchtitan-eager"), batch(tp=tp, sp=tp > 1)).moved_bytes for tp in (1, 8))
    assert eight == pytest.approx(one / 8)


def test_selective_recomputation_repeats_the_share_that_the_stack_names() -> None:
    """torchtitan repeats all element-wise work, by default half of it is repeated."""
    whole = layer_work(layer_of("torchtitan"), batch())
    assert whole.repeated_bytes == pytest.approx(whole.moved_bytes)
    half = layer_work(layer_of("megatron"), batch())
    assert half.repeated_bytes == pytest.approx(half.moved_bytes / 2)


def test_selective_recomputation_of_torchtitan_gathers_again() -> None:
    """Two gathers of a layer are one all-reduce; the scatters are kept."""
    once = layer_work(layer_of("torchtitan"), batch(tp=8, sp=True))
    assert [call.num_calls for call in once.repeated_collectives] == [1.0]
    assert layer_work(layer_of("torchtitan"), batch()).repeated_collectives == ()
    assert layer_work(layer_of("megatron"), batch(tp=8, sp=True)).repeated_collectives == ()


def test_keys_are_repeated_before_they_are_exchanged() -> None:
    """Eight heads of keys and values become thirty-two: four times the bytes, in the exchange and its buffer."""
    (plain,), (wide,) = (list(layer_exchanges(layer_of(name), batch(cp=4))) for name in ("megatron", "torchtitan"))
    assert wide.num_bytes == pytest.approx(plain.num_bytes * HEADS / KV_HEADS)
    load, degrees = MicroBatchLoad(tokens=TOKENS / 4, sequence_length=TOKENS, precision_bytes=2), StageDegrees(cp=4)
    plain_bytes, wide_bytes = (
        exchange_buffer_bytes(layer_of(name), degrees, load) for name in ("megatron", "torchtitan")
    )
    assert wide_bytes == pytest.approx(4 * plain_bytes) == pytest.approx(2 * TOKENS * 2 * HIDDEN)


def test_inputs_of_8_bits_are_gathered_in_8_bits() -> None:
    """A gather of one byte and a scatter of two, in place of two and two; the stack with scales per row gathers two."""
    sizes = {
        (name, kind): next(layer_exchanges(layer_of(name, kind), batch(tp=8, sp=True))).num_bytes
        for name in ("torchtitan", "megatron")
        for kind in ("bf16", "fp8")
    }
    assert sizes["torchtitan", "fp8"] == pytest.approx(0.75 * sizes["torchtitan", "bf16"])
    assert sizes["megatron", "fp8"] == sizes["megatron", "bf16"]


def exposed_s(stack: str, **degrees: object) -> tuple[float, float]:
    """Seconds that the exchanges of tensor parallelism add to a forward and a backward pass."""
    work = layer_work(layer_of(stack), batch(tp=8, sp=True, **degrees))
    with_them, without = (pass_time(HOST, one, "bf16") for one in (work, _alone(work)))
    return with_them.forward_s - without.forward_s, with_them.backward_s - without.backward_s


def _alone(work: ChipWork) -> ChipWork:
    return ChipWork(**{**vars(work), "collectives": ()})


def test_what_hides_exchanges_of_the_backward_pass_is_the_stack_s() -> None:
    """DTensor hides none; Megatron the scatters behind weight gradients, not the gathers that products wait for."""
    call = next(layer_exchanges(layer_of("torchtitan"), batch(tp=8, sp=True)))
    whole_s = collective_call_s(HOST.topology, call)
    assert exposed_s("torchtitan") == pytest.approx((whole_s, whole_s))
    assert exposed_s("megatron") == pytest.approx((whole_s, whole_s / 2))
    assert exposed_s("isthmus")[1] < whole_s / 10, "all of them, as far as weight gradients last"


def test_overlapped_exchanges_of_torchtitan_hide_in_the_forward_pass_alone() -> None:
    """Of a forward pass an eighth stays, behind the first part of eight; the backward pass keeps all of them."""
    whole_s, back_s = exposed_s("torchtitan", overlap_tp=False)
    forward_s, backward_s = exposed_s("torchtitan", overlap_tp=True)
    assert forward_s < whole_s / 4
    assert backward_s == pytest.approx(back_s)
    assert exposed_s("megatron", overlap_tp=True)[1] < back_s / 4


MIXTRAL = profile_model(load_model(Path(__file__).parent / "configs" / "mixtral-8x7b.json"))


def test_megatron_launches_products_expert_by_expert() -> None:
    """Eight experts on two chips: four on each, two products of 33 us over the 0.7 ms of a layer."""
    layer = stacked_profile(MIXTRAL, "megatron", "bf16").layers[0]
    assert layer_work(layer, batch(ep=2)).num_launches == pytest.approx(1 + 4 * 2 * 33 / 700, rel=0.01)
    assert layer_work(layer_of("megatron"), batch()).num_launches == 1.0
    assert layer_work(MIXTRAL.layers[0], batch(ep=2)).num_launches == 1.0, "this project's runtime"


def test_megatron_sorts_tokens_by_expert_and_back() -> None:
    """Two sorts that read and write 2 bytes an element of each copy of a token; two copies."""
    layer = stacked_profile(MIXTRAL, "megatron", "bf16").layers[0]
    assert {rule.when for rule in layer.traffic} == {"added"}
    with_sorts, without = (per_token(layer_work(one, batch())) for one in (layer, replace(layer, traffic=())))
    assert with_sorts[0] - without[0] == pytest.approx(8 * 2 * HIDDEN)
    assert with_sorts[1] - without[1] == pytest.approx(8 * 2 * HIDDEN)


def fsdp_load(stack: Stack | str, **fields: object) -> StageLoad:
    """The only stage's load of Llama 3.1 8B on one node of A100s, with ZeRO 3."""
    plan = even_plan(32, tp=1, pp=1, dp=8, micro_batches=1, micro_batch_size=1, sequence_length=TOKENS, zero=3,
                     stack=stack, **fields)  # fmt: skip
    return stage_costs(plan, public_cluster("A100", 8, 400.0), LLAMA, DATA_SHEET)[0].load


def test_fsdp_copies_weights_out_and_gradients_into_the_buffers_of_its_exchanges() -> None:
    """4 bytes a parameter in the forward pass, 4 + 6 in the backward pass; none where weights stay gathered."""
    stack = find_stack("torchtitan")
    bare = stack.model_copy(
        update={
            "name": "bare",
            "gathered": stack.gathered.model_copy(update={"forward_copy_bytes": 0.0, "backward_copy_bytes": 0.0}),
        }
    )
    parameters = 32 * LLAMA.layers[0].parameters + 2 * VOCABULARY * HIDDEN + HIDDEN
    each_s = parameters / (2.039e12 * DATA_SHEET.value("memory_share"))
    copied, plain = fsdp_load(stack), fsdp_load(bare)
    assert copied.forward_s - plain.forward_s == pytest.approx(4 * each_s)
    assert copied.backward_s - plain.backward_s == pytest.approx(10 * each_s)
    kept = {"sharding": ShardGroup(reshard=False)}
    assert fsdp_load(stack, **kept).forward_s == fsdp_load(bare, **kept).forward_s


def memory_of(stack: str, *, tp: int = 1, layers: tuple[int, int] = (0, 32), zero: int = 3) -> StageMemory:
    """The memory of a stage of the model on one chip of eight replicas, everything recomputed."""
    return stage_memory(
        stacked_profile(LLAMA, stack, "bf16"), layers, is_first=layers[0] == 0, is_last=layers[1] == 32,
        micro_batch_size=1, sequence_length=TOKENS, in_flight=1, tp=tp, sp=tp > 1, dp=8, zero=zero, recompute="full",
    )  # fmt: skip


def test_the_loss_that_is_not_compiled_strands_two_bytes_a_logit() -> None:
    """Bf16 and fp32 logits leave a hole of 6 bytes; one of two fp32 gradients fits, 2 bytes stay between them."""
    for tp in (1, 8):
        memory = memory_of("torchtitan-2024", tp=tp)
        assert memory.stranded_bytes == pytest.approx(2 * TOKENS * VOCABULARY / tp)
    assert memory_of("torchtitan-2024", layers=(0, 16)).stranded_bytes == 0.0, "the first stage has no loss"
    assert memory_of("torchtitan").stranded_bytes == 0.0, "the compiled loss has no tensors in fp32"
    stack = find_stack("torchtitan-2024")
    assert reserved_bytes(100.0, 1000.0, stack, 10.0) == pytest.approx(112.0)
    assert reserved_bytes(100.0, 105.0, stack, 10.0) == 105.0, "given back when memory runs out"


def test_a_loss_over_a_divided_vocabulary_has_three_temporaries() -> None:
    """12 bytes a logit beside the kept 4, where a whole vocabulary has 8."""
    divided = find_stack("torchtitan-2024").loss
    assert (divided.peak_of(1), divided.peak_of(8)) == (8, 12)
    assert (divided.stranded_of(1), divided.stranded_of(8)) == (2, 2)
    whole = find_stack("megatron").loss
    assert whole.peak_of(8) == whole.peak_of(1)


def test_a_pipeline_of_fsdp_sums_the_gradients_of_its_whole_stage() -> None:
    """Four bytes a parameter of the stage, embedding included, beside the weights that stay gathered."""
    stage = memory_of("torchtitan", layers=(0, 16))
    flat = memory_of("torchtitan", layers=(0, 16), zero=0)
    layer = LLAMA.layers[0].parameters
    table = VOCABULARY * HIDDEN
    gathered = 16 * 2 * layer + 2 * table + 6 * layer
    sums = 4 * (16 * layer + table)
    assert stage.buffers_bytes - flat.buffers_bytes == pytest.approx(gathered + sums, rel=1e-6)


@pytest.mark.parametrize(("micro_batches", "share"), [(4, 0.5), (8, 1.0)])
def test_chunks_that_take_turns_once_sum_the_gradients_of_one_at_a_time(micro_batches: int, share: float) -> None:
    """Two chunks of four layers: with as many micro-batches as stages the first is reduced before the second begins."""
    plans = [
        even_plan(32, tp=1, pp=4, dp=2, micro_batches=micro_batches, micro_batch_size=1, sequence_length=TOKENS,
                  zero=3, stack="torchtitan", **fields)
        for fields in ({"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2})
    ]  # fmt: skip
    profile = stacked_profile(LLAMA, "torchtitan", "bf16")
    whole, chunked = (plan_stage_memory(plan, profile, plan.pipeline(0), 1).buffers_bytes for plan in plans)
    assert whole - chunked == pytest.approx((1 - share) * 4 * 8 * LLAMA.layers[0].parameters)


@pytest.mark.parametrize(("precision", "each"), [("bf16", 2), ("fp8", 1)])
def test_dtensor_keeps_the_gathered_inputs_of_products(precision, each):
    """Two inputs of all tokens less the part of 8 chips: in every layer without recomputation, in one with it.

    In 8 bits where they are gathered so. Megatron-LM gathers them again.
    """
    tokens, kept = 8192, 2 * 8192 * 4096 * each * 7 / 8

    def memory(stack: str, recompute: str, *, gathered: bool) -> StageMemory:
        found = find_stack(stack)
        rule = found.exchanges.model_copy(update={"keeps_gathered": gathered})
        profile = stacked_profile(LLAMA, found.model_copy(update={"exchanges": rule}), precision)
        return stage_memory(
            profile, (0, 8), is_first=False, is_last=False, micro_batch_size=1, sequence_length=tokens, in_flight=1,
            tp=8, sp=True, recompute=recompute,
        )  # fmt: skip

    assert find_stack("torchtitan").exchanges.keeps_gathered
    assert not find_stack("megatron").exchanges.keeps_gathered
    full, without = (memory("torchtitan", "full", gathered=gathered) for gathered in (True, False))
    assert full.allocated_bytes - without.allocated_bytes == pytest.approx(kept)
    every, none = (memory("torchtitan", "none", gathered=gathered) for gathered in (True, False))
    assert every.activations_bytes - none.activations_bytes == pytest.approx(8 * kept)
