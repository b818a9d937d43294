"""The work of a layer, of the head and of the embedding by hand: operations, bytes and what else a pass does.

100 tokens a chip of a sequence of 400, two bytes a value, hidden size 8 (`round_numbers`).
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from isthmus.core.stack import find_stack
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.component import SavedTensor, Weight
from isthmus.plan.profile.layer_profile import LayerProfile, RepeatedWork
from isthmus.plan.time.layer_exchanges import ChipMicroBatch, CollectiveCall, layer_exchanges
from isthmus.plan.time.stage_work import ChipWork, embedding_work, head_work, layer_work
from tests.plan.round_numbers import ATTENTION, CORE, DENSE, DENSE_LAYER, EXPERT_LAYER, profile_of

T, HIDDEN = 100, 100 * 8 * 2
EARLY, OUT, INNER = 64 + 32 + 64, 128, 256
"""Elements of query, key and value; of the output projection; of each of three matrices after it."""

MEAN_KEYS = (400 + 1) / 2
CORE_FLOPS = T * 2 * 4 * (2 + 4) * MEAN_KEYS
"""Two operations for each value of key and value, head, and key that a query sees: half of the sequence."""


def batch(packed_tokens: int | None = None, **degrees: object) -> ChipMicroBatch:
    """100 tokens of a sequence of 400, in values of two bytes."""
    return ChipMicroBatch(
        tokens=T, sequence_length=400, precision_bytes=2, packed_tokens=packed_tokens,
        degrees=StageDegrees(**degrees),  # type: ignore[arg-type]
    )  # fmt: skip


def work_of(layer: LayerProfile = DENSE_LAYER, packed_tokens: int | None = None, **degrees: object) -> ChipWork:
    """The work of a layer on one chip."""
    return layer_work(layer, batch(packed_tokens, **degrees))


def assert_work(work: ChipWork, **expected: object) -> None:
    """All fields are as expected, those that are not named as a new `ChipWork` has them."""
    plain = ChipWork()
    for field in fields(ChipWork):
        value = expected.get(field.name, getattr(plain, field.name))
        value = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        assert getattr(work, field.name) == value, field.name


def product_bytes(*elements: int, rows: float = T, width: int = 8) -> float:
    """Bytes of matrices that are read, and of their inputs and results for `rows` tokens."""
    return sum(2 * (each + rows * (width + each / width)) for each in elements)


KEPT = T * 2 * (8 + 16 + 8 + 64 + 8)
"""What autograd keeps of a layer: inputs of products and the norm, the core's and the first products' results."""


def test_a_dense_layer_on_one_chip() -> None:
    """Products 2 operations an element and token; kept tensors are written and read, two residuals added."""
    moved = 2 * KEPT + 6 * HIDDEN
    assert_work(
        work_of(),
        matmul_flops=2.0 * T * (EARLY + OUT + 3 * INNER),
        overlapping_flops=2.0 * T * (EARLY + 2 * INNER),
        matmul_bytes=product_bytes(64, 32, 64, OUT, INNER, INNER, INNER),
        attention_flops=CORE_FLOPS,
        attention_backward_ratio=2.5,
        keys_per_query=MEAN_KEYS,
        elements_per_head=3.0,
        moved_bytes=float(moved),
        moved_back_bytes=2.0 * moved,
        repeated_bytes=moved / 2,
        num_launches=1.0,
        repeated_flops=0.0,
    )


def test_two_tensor_parallel_chips_halve_the_products_and_what_is_cut() -> None:
    """Of what is kept the core's and the first products' results; with sequence parallelism all of it."""
    flops = {
        "matmul_flops": T * (EARLY + OUT + 3.0 * INNER),
        "overlapping_flops": T * (EARLY + 2.0 * INNER),
        "matmul_bytes": product_bytes(32, 16, 32, OUT // 2, *[INNER // 2] * 3),
        "attention_flops": CORE_FLOPS / 2,
        "attention_backward_ratio": 2.5,
        "keys_per_query": MEAN_KEYS,
        "elements_per_head": 3.0,
        "num_launches": 1.0,
    }
    for sp, kept, residual in ((False, T * 2 * (8 + 8 + 8 + 32 + 8), 6 * HIDDEN), (True, KEPT / 2, 3 * HIDDEN)):
        moved = 2.0 * kept + residual
        calls = tuple(layer_exchanges(DENSE_LAYER, batch(tp=2, sp=sp)))
        assert calls
        assert_work(
            work_of(tp=2, sp=sp), **flops, moved_bytes=moved, moved_back_bytes=2 * moved, repeated_bytes=moved / 2,
            collectives=calls,
        )  # fmt: skip


def test_more_chips_than_heads_of_keys_hold_them_twice() -> None:
    """Of 4 chips two have the same keys and values, each half of the matrices; of 8 none has less than a head."""
    assert work_of(tp=4).matmul_flops == 2 * T * (64 / 4 + 32 / 2 + 64 / 2 + OUT / 4 + 3 * INNER / 4)
    assert work_of(tp=8).matmul_flops == 2 * T * (64 / 4 + 32 / 2 + 64 / 2 + OUT / 4 + 3 * INNER / 8)
    assert work_of(tp=8).attention_flops == pytest.approx(CORE_FLOPS / 4)


def test_experts_on_one_chip_multiply_two_copies_of_each_token() -> None:
    """All four matrices are read; the router, which nothing reduces, is cut by nobody."""
    work = work_of(EXPERT_LAYER)
    assert work.matmul_flops == 2 * T * (EARLY + OUT + 32 + 2 * 3 * INNER)
    assert work.overlapping_flops == 2 * T * (EARLY + 32 + 2 * 2 * INNER)
    experts = 3 * 2 * (4 * INNER + 2 * T * (8 + INNER / 8))
    assert work.matmul_bytes == product_bytes(64, 32, 64, OUT, 32) + experts
    assert work_of(EXPERT_LAYER, tp=2).matmul_flops == 2 * T * ((EARLY + OUT) / 2 + 32 + 2 * 3 * INNER / 2)


def test_experts_dealt_over_chips_are_whole_and_fewer() -> None:
    """Two of four chips each; as many copies arrive as a chip sends, a part of them with sequence parallelism."""
    alone, halves = work_of(EXPERT_LAYER, ep=2), work_of(EXPERT_LAYER, ep=2, tp=2, sp=True)
    assert alone.matmul_flops == 2 * T * (EARLY + OUT + 32 + 2 * 3 * INNER)
    assert alone.matmul_bytes == product_bytes(64, 32, 64, OUT, 32) + 3 * 2 * (2 * INNER + 2 * T * (8 + INNER / 8))
    assert halves.matmul_flops == 2 * T * ((EARLY + OUT) / 2 + 32 + 3 * INNER)
    three = work_of(EXPERT_LAYER, ep=3)
    assert three.matmul_bytes == alone.matmul_bytes, "4 experts on 3 chips: one has 2"


@pytest.mark.parametrize(("ep", "experts"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_products_of_experts_are_launched_one_by_one(ep: int, experts: int) -> None:
    """Each a share of a layer's launches, all of them half in a compiled layer."""
    layer = replace(EXPERT_LAYER, launch_ratio=0.5, expert_launch_ratio=0.25)
    assert work_of(layer, ep=ep).num_launches == 0.5 * (1 + 0.25 * experts)


def test_chips_that_share_a_sequence_see_all_of_its_keys_by_blocks_in_a_ring() -> None:
    """The kernel is called for the keys of each of 4 chips; a gather calls it so only where a stack merges blocks."""
    merging = replace(
        DENSE_LAYER,
        exchanges=DENSE_LAYER.exchanges.model_copy(update={"merge_forward_bytes": 5.0, "merge_backward_bytes": 7.0}),
    )
    kinds = ("gather", "ring", "all_to_all")
    assert [work_of(cp=4, cp_kind=kind).keys_per_query for kind in kinds] == [MEAN_KEYS, MEAN_KEYS / 4, MEAN_KEYS]
    assert [work_of(merging, cp=4, cp_kind=kind).keys_per_query for kind in kinds] == [
        MEAN_KEYS / 4, MEAN_KEYS / 4, MEAN_KEYS
    ]  # fmt: skip
    assert work_of(cp=4).shares_context
    assert work_of(cp=4).attention_flops == pytest.approx(CORE_FLOPS)
    for tp, pieces in ((1, 1), (2, 2), (8, 4)):
        merged = 3 * T * 4 * 4 / pieces
        for kind, count in (("gather", 1), ("ring", 1), ("all_to_all", 0)):
            plain, more = (work_of(one, cp=4, tp=tp, cp_kind=kind) for one in (DENSE_LAYER, merging))
            assert more.moved_bytes - plain.moved_bytes == pytest.approx(5 * merged * count)
            assert (more.moved_back_bytes or 0) - (plain.moved_back_bytes or 0) == pytest.approx(7 * merged * count)


def test_attention_stays_inside_a_document_or_a_window() -> None:
    """Of documents of 50 tokens a query sees 25.5 keys; of a window of 100 in 400: 100 but for the first ones."""
    assert work_of(packed_tokens=50).attention_flops == pytest.approx(CORE_FLOPS * 25.5 / MEAN_KEYS)
    assert work_of(packed_tokens=50).keys_per_query == 25.5
    window = replace(DENSE_LAYER, attention=replace(ATTENTION, core=replace(CORE, window=100)))
    assert work_of(window).keys_per_query == (100 * 101 / 2 + 300 * 100) / 400


def test_an_eager_core_computes_all_scores_and_keeps_them() -> None:
    """The whole square of the sequence, whatever the documents; backward twice the forward."""
    scores = SavedTensor(name="scores.softmax", width=4, per_key=True, cut="tp")
    eager = replace(DENSE_LAYER, attention=replace(ATTENTION, saved=(*ATTENTION.saved, scores)))
    for packed, tp in ((None, 1), (50, 1), (None, 2)):
        work = work_of(eager, packed, tp=tp)
        assert work.attention_flops == T * 2 * 4 * (2 + 4) * 400 / tp
        assert work.attention_backward_ratio == 2.0


def test_a_layer_without_attention_has_no_core() -> None:
    """No operations, one key, no heads, nothing to merge."""
    bare = work_of(replace(DENSE_LAYER, attention=replace(ATTENTION, core=None)), cp=2)
    assert (bare.attention_flops, bare.attention_backward_ratio, bare.keys_per_query) == (0.0, 2.0, 1.0)
    assert bare.elements_per_head == 0.0


def test_selective_recomputation_repeats_what_the_layer_names() -> None:
    """Products by name; a share of the traffic, residuals with it unless modules are chosen; the core or not."""
    moved = 2 * KEPT + 6 * HIDDEN
    named = replace(
        DENSE_LAYER, repeated_weights=("q", "gate"), repeats_attention=False, repeated_traffic_share=0.25,
        num_repeated_exchanges=1.0, attention_kernel="flash2",
    )  # fmt: skip
    work = work_of(named, tp=2)
    assert work.repeated_flops == T * (64 + INNER)
    assert not work.repeats_attention
    assert work_of(named).repeated_bytes == moved / 4
    assert [one.num_calls for one in work.repeated_collectives] == [1.0]
    assert work.attention_kernel == "flash2"
    modules = replace(DENSE_LAYER, repeated=RepeatedWork(traffic_share=0.125))
    assert work_of(modules).repeated_bytes == 2 * KEPT / 8


def test_a_stack_that_fuses_element_wise_work_moves_its_share() -> None:
    """Of what is kept; residual additions stay whole."""
    assert work_of(replace(DENSE_LAYER, traffic_ratio=0.5)).moved_bytes == KEPT + 6 * HIDDEN


def test_frozen_weights_are_counted_apart() -> None:
    """Two operations an element and token of theirs, on the chip's part of them."""
    weights = tuple(replace(one, trainable=one.name not in ("gate", "down")) for one in DENSE.weights)
    frozen = replace(DENSE_LAYER, feed_forward=replace(DENSE, weights=weights))
    assert work_of(frozen).frozen_flops == 2 * T * 2 * INNER
    assert work_of(frozen, tp=2).frozen_flops == T * 2 * INNER
    assert work_of().frozen_flops == 0


def test_the_head_multiplies_the_vocabulary_and_its_loss_moves_bytes_a_logit() -> None:
    """16 logits a token, divided by tensor parallelism; half an all-reduce of the hidden states before it."""
    stack = find_stack("isthmus")
    profile = profile_of(DENSE_LAYER)
    for tp in (1, 2):
        calls = (CollectiveCall(kind="all_reduce", num_bytes=HIDDEN, size=2, num_calls=0.5, overlaps=True),)
        assert_work(
            head_work(profile, batch(tp=tp)),
            matmul_flops=2.0 * T * 128 / tp,
            overlapping_flops=2.0 * T * 128 / tp,
            repeated_flops=2.0 * T * 128 / tp,
            repeats_attention=False,
            repeated_bytes=0.0,
            matmul_bytes=product_bytes(128 // tp),
            moved_bytes=stack.loss.forward_bytes * T * 16 / tp + 4.0 * HIDDEN,
            collectives=calls if tp > 1 else (),
        )
    exposed = stack.model_copy(update={"exchanges": stack.exchanges.model_copy(update={"hides_backward": False})})
    (call,) = head_work(profile_of(DENSE_LAYER, stack=exposed), batch(tp=2)).collectives
    assert not call.overlaps
    frozen = replace(profile.head, weights=(replace(profile.head.weights[0], trainable=False),))
    assert head_work(profile_of(DENSE_LAYER, head=frozen), batch(tp=2)).frozen_flops == T * 128


def test_the_embedding_reads_and_writes_a_row_of_each_token() -> None:
    """And tensor-parallel chips, which hold a part of the rows each, sum them: half an all-reduce."""
    profile = profile_of(DENSE_LAYER)
    assert_work(embedding_work(profile, batch()), moved_bytes=2.0 * HIDDEN)
    calls = (CollectiveCall(kind="all_reduce", num_bytes=HIDDEN, size=2, num_calls=0.5),)
    assert_work(embedding_work(profile, batch(tp=2)), moved_bytes=2.0 * HIDDEN, collectives=calls)


def test_vectors_multiply_nothing() -> None:
    """A norm's weight is no product, whatever component it is in."""
    scaled = replace(DENSE, weights=(*DENSE.weights, Weight(name="scale", vector_elements=1000)))
    assert work_of(replace(DENSE_LAYER, feed_forward=scaled)).matmul_bytes == work_of().matmul_bytes
