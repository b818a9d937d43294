"""The collectives of a layer by hand, whole: kind, bytes, chips, calls, and what hides each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.plan_parts.expert_exchange import ExpertExchange
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.layer_profile import LayerProfile, RepeatedWork
from isthmus.plan.time.layer_exchanges import ChipMicroBatch, CollectiveCall, layer_exchanges, repeated_exchanges
from tests.plan.round_numbers import DENSE_LAYER, EXPERT_LAYER, EXPERTS

HIDDEN = 100 * 8 * 2
"""Bytes of the hidden states of 100 tokens of 8 values of 2 bytes."""

EXCHANGE = CollectiveCall(kind="all_reduce", num_bytes=HIDDEN, size=2, num_calls=2.0, overlaps=True)
"""Two all-reduces of the hidden states of two tensor-parallel chips, one after each part of a layer."""


def batch(packed_tokens: int | None = None, precision_bytes: int = 2, **degrees: object) -> ChipMicroBatch:
    """100 tokens a chip of a sequence of 400."""
    return ChipMicroBatch(
        tokens=100, sequence_length=400, precision_bytes=precision_bytes, packed_tokens=packed_tokens,
        degrees=StageDegrees(**degrees),  # type: ignore[arg-type]
    )  # fmt: skip


def calls(layer: LayerProfile = DENSE_LAYER, precision_bytes: int = 2, **degrees: object) -> list[CollectiveCall]:
    """The exchanges of a forward pass."""
    return list(layer_exchanges(layer, batch(precision_bytes=precision_bytes, **degrees)))


def ruled(layer: LayerProfile = DENSE_LAYER, **rules: object) -> LayerProfile:
    """The layer under other rules of its stack."""
    return replace(layer, exchanges=layer.exchanges.model_copy(update=rules))


def test_documents_are_as_long_as_a_sequence_at_most() -> None:
    """Attention works among the tokens of a document, or of the sequence where none is named."""
    assert [batch(packed_tokens=each).document_length for each in (None, 50, 1000)] == [400, 50, 400]


def test_a_layer_on_one_chip_exchanges_nothing() -> None:
    """Neither tokens nor experts nor keys."""
    assert calls() == calls(EXPERT_LAYER) == []


def test_tensor_parallel_chips_reduce_the_hidden_states_after_each_part_of_a_layer() -> None:
    """Behind weight gradients, unless the stack or the plan says otherwise."""
    assert calls(tp=2) == [EXCHANGE]
    assert calls(tp=2, precision_bytes=4) == [replace(EXCHANGE, num_bytes=2 * HIDDEN)]
    exposed = replace(EXCHANGE, overlaps=False)
    assert calls(ruled(hides_backward=False), tp=2) == [exposed]
    assert calls(tp=2, overlap_tp=False) == [exposed]


def test_an_overlapped_exchange_runs_beside_products_in_both_passes() -> None:
    """In the forward pass alone where the stack overlaps no backward; only its scatters where it gathers first."""
    beside = replace(EXCHANGE, overlaps=False, behind="products")
    assert calls(tp=2, overlap_tp=True) == [beside]
    assert calls(ruled(overlaps_backward=False), tp=2, overlap_tp=True) == [replace(beside, behind_backward=False)]
    half = replace(beside, num_calls=1.0)
    assert calls(ruled(overlaps_gathers=False), tp=2, overlap_tp=True) == [half, replace(half, behind="none")]
    assert calls(ruled(overlaps_gathers=False), tp=2) == [EXCHANGE]


def test_half_of_an_exchange_is_a_gather_that_the_backward_pass_waits_for() -> None:
    """With sequence parallelism and a stack that gathers before its products; a plan that says more goes before."""
    half = replace(EXCHANGE, num_calls=1.0)
    early = ruled(gathers_before=True)
    assert calls(early, tp=2, sp=True) == [half, replace(half, overlaps=False)]
    assert calls(early, tp=2) == calls(tp=2, sp=True) == [EXCHANGE]
    assert calls(early, tp=2, sp=True, overlap_tp=False) == [replace(EXCHANGE, overlaps=False)]
    assert calls(early, tp=2, sp=True, overlap_tp=True) == [replace(EXCHANGE, overlaps=False, behind="products")]


@pytest.mark.parametrize(("shared", "num_calls"), [(0, 1.0), (1, 2.0)])
def test_experts_dealt_over_chips_leave_one_exchange_to_attention(shared: int, num_calls: float) -> None:
    """A shared expert is cut as a dense part is, and reduced; so are experts that no expert parallelism deals out."""
    layer = replace(EXPERT_LAYER, feed_forward=replace(EXPERTS, shared_experts=shared))
    first, *_ = calls(layer, tp=2, ep=2)
    assert first == replace(EXCHANGE, num_calls=num_calls)
    assert calls(layer, tp=2) == [EXCHANGE]
    assert calls(DENSE_LAYER, tp=2, ep=2) == [EXCHANGE]


DEALT = CollectiveCall(kind="all_to_all", num_bytes=2 * HIDDEN, size=4, num_calls=2.0, num_experts=4)
"""Two copies of each token go to the experts of four chips, and come back."""


def test_tokens_go_to_their_experts_and_back() -> None:
    """A copy to each; all tokens to all; or one to each node. With sequence parallelism each chip has its half."""
    assert calls(EXPERT_LAYER, ep=4) == [DEALT]
    assert calls(EXPERT_LAYER, ep=4, tp=2, sp=True)[-1] == replace(DEALT, num_bytes=HIDDEN)
    assert calls(EXPERT_LAYER, ep=4, tp=2)[-1] == DEALT
    gathered = ExpertExchange(dispatcher="all_gather")
    assert calls(EXPERT_LAYER, ep=4, experts=gathered) == [replace(DEALT, kind="all_gather", num_bytes=4 * HIDDEN)]
    nodes = replace(
        DEALT, kind="node_all_to_all", num_bytes=HIDDEN, experts_per_token=2, routing_groups=2, groups_per_token=1
    )
    limited = replace(EXPERT_LAYER, feed_forward=replace(EXPERTS, routing_groups=2))
    assert calls(limited, ep=4, experts=ExpertExchange(dispatcher="deepep")) == [nodes]
    loose = replace(EXPERT_LAYER, feed_forward=replace(EXPERTS, routing_groups=4, groups_per_token=3))
    (call,) = calls(loose, ep=4, experts=ExpertExchange(dispatcher="deepep"))
    assert (call.routing_groups, call.groups_per_token) == (4, 3)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather", "deepep"])
def test_a_narrow_dispatch_sends_a_byte_a_value_and_a_scale_for_128(dispatcher: str) -> None:
    """Of the two ways one has (1 + 4 / 128) of 2 bytes; where a plan overlaps it, another micro-batch hides it."""
    plain, narrow, hidden = (
        calls(EXPERT_LAYER, ep=2, narrow_dispatch=narrow, experts=ExpertExchange(dispatcher=dispatcher, overlap=over))
        for narrow, over in ((False, False), (True, False), (True, True))
    )
    assert narrow == [replace(plain[0], num_calls=1 + (1 + 4 / 128) / 2)]
    assert hidden == [replace(narrow[0], behind="other")]


PAIRS = 100 * 2 * 12
"""Bytes of the keys and values of 100 tokens: 12 values each."""


def test_chips_that_share_a_sequence_exchange_what_their_kind_says() -> None:
    """A gather to all keys, twice backward; a ring behind the core, twice too; heads there and their results back."""
    gather = CollectiveCall(kind="all_gather", num_bytes=4 * PAIRS, size=4, backward_ratio=2.0)
    assert calls(cp=4) == [gather]
    assert calls(cp=4, cp_rates=(1.0, 1.0, 0.5, 0.5)) == [replace(gather, num_bytes=3 * PAIRS)]
    ring = CollectiveCall(kind="ring", num_bytes=PAIRS, size=4, behind="core", backward_ratio=2.0)
    assert calls(cp=4, cp_kind="ring") == [ring]
    there = CollectiveCall(kind="all_to_all", num_bytes=100 * 2 * 4 * 2 + PAIRS, size=4)
    back = CollectiveCall(kind="all_to_all", num_bytes=100 * 2 * 4 * 4, size=4)
    assert calls(cp=4, cp_kind="all_to_all") == [there, back]


@pytest.mark.parametrize("kind", ["gather", "ring", "all_to_all"])
def test_tensor_parallel_chips_exchange_the_keys_of_their_heads(kind: str) -> None:
    """Each half of the bytes, with chips that are two positions apart."""
    alone, halves = calls(cp=4, cp_kind=kind), calls(cp=4, cp_kind=kind, tp=2)[1:]
    assert halves == [replace(one, num_bytes=one.num_bytes / 2, stride=2) for one in alone]


def test_a_layer_without_attention_shares_a_sequence_for_nothing() -> None:
    """It has no keys."""
    bare = replace(DENSE_LAYER, attention=replace(DENSE_LAYER.attention, core=None))
    assert calls(bare, cp=4) == []


def test_selective_recomputation_repeats_the_exchanges_that_its_modules_need() -> None:
    """Of chosen modules: their all-reduces, the tokens of experts; else as many as the stack says, on several chips."""
    exchange = replace(EXCHANGE, num_calls=1.5)
    chosen = replace(
        EXPERT_LAYER, repeated=RepeatedWork(traffic_share=0.5, num_tp_exchanges=1.5, expert_exchanges=True)
    )
    assert list(repeated_exchanges(chosen, batch(tp=2, ep=4))) == [exchange, DEALT]
    assert list(repeated_exchanges(chosen, batch(tp=2))) == [exchange]
    assert list(repeated_exchanges(chosen, batch(ep=4))) == [DEALT]
    bare = replace(EXPERT_LAYER, repeated=RepeatedWork(traffic_share=0.5))
    assert list(repeated_exchanges(bare, batch(tp=2, ep=4))) == []
    stack = replace(DENSE_LAYER, num_repeated_exchanges=1.5)
    assert list(repeated_exchanges(stack, batch(tp=2))) == [exchange]
    assert list(repeated_exchanges(stack, batch())) == list(repeated_exchanges(DENSE_LAYER, batch(tp=2))) == []


def test_8_bit_inputs_are_gathered_in_8_bits_by_stacks_that_do_so() -> None:
    """1 byte of 2 in the first half of an exchange, 2 in the second: three quarters; of 4 bytes five eighths."""
    narrow = replace(ruled(narrow_gathers=True), narrow_products=True)
    assert calls(narrow, tp=2) == [replace(EXCHANGE, num_bytes=0.75 * HIDDEN)]
    assert calls(narrow, tp=2, precision_bytes=4) == [replace(EXCHANGE, num_bytes=0.625 * 2 * HIDDEN)]
    assert calls(replace(narrow, narrow_products=False), tp=2) == [EXCHANGE]
    assert calls(replace(DENSE_LAYER, narrow_products=True), tp=2) == [EXCHANGE]
