"""`layer_exchanges`: the collectives of a decoder layer's forward pass, by kind of parallelism, and what hides them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.layer_profile import LayerProfile

_NARROW_DISPATCH = (1 + 4 / 128) / 2
"""Bytes of a dispatched token in 8 bits, with a scale of fp32 for 128 elements, over those in 16 (DeepEP)."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """Calls of a collective among `size` chips that are `stride` positions apart."""

    kind: Literal["all_reduce", "all_gather", "all_to_all", "node_all_to_all", "ring"]
    num_bytes: float
    """Bytes that each chip has after an all-gather, or that each chip contributes to the others (`node_all_to_all`:
    one copy of its tokens; `ring`: what it passes on in one step)."""
    size: int
    stride: int = 1
    num_calls: float = 1.0
    """Number of calls."""
    overlaps: bool = False
    """Whether its backward counterpart overlaps with weight gradients."""
    behind: Literal["none", "products", "core", "other"] = "none"
    """What hides it, forward and backward: products around it, steps of the attention core, another micro-batch."""
    behind_backward: bool = True
    """Whether that hides it in the backward pass as well."""
    backward_ratio: float = 1.0
    """Calls of the backward pass over those of the forward pass."""
    num_experts: int = 0
    """Experts of the layer, if it exchanges tokens with them."""
    experts_per_token: int = 0
    routing_groups: int = 1
    """Groups of the experts, `groups_per_token` of which a token chooses from."""
    groups_per_token: int = 1


@dataclass(frozen=True, kw_only=True)
class ChipMicroBatch:
    """The part of a micro-batch that one chip processes; `tokens` is divided by context parallelism."""

    tokens: float
    sequence_length: int
    precision_bytes: int
    degrees: StageDegrees
    packed_tokens: int | None = None
    """Tokens of a document, if several share a sequence; attention stays inside one."""

    @property
    def document_length(self) -> int:
        """Tokens among which attention works."""
        return min(self.packed_tokens or self.sequence_length, self.sequence_length)


def layer_exchanges(layer: LayerProfile, micro_batch: ChipMicroBatch) -> Iterator[CollectiveCall]:
    """Yield the collectives of a forward pass; a backward pass has the same, `backward_ratio` times."""
    degrees, part = micro_batch.degrees, layer.feed_forward
    if degrees.tp > 1:
        dealt = part.num_experts > 0 and degrees.ep > 1
        yield from _tensor_exchanges(layer, micro_batch, 1.0 if dealt and not part.shared_experts else 2.0)
    if degrees.ep > 1 and part.num_experts:
        yield from _expert_exchanges(layer, micro_batch)
    if degrees.cp > 1:
        yield from _context_exchanges(layer, micro_batch)


def repeated_exchanges(layer: LayerProfile, micro_batch: ChipMicroBatch) -> Iterator[CollectiveCall]:
    """Yield the collectives that selective recomputation of the layer's modules repeats."""
    repeated = layer.repeated
    if repeated is None:
        if layer.num_repeated_exchanges and micro_batch.degrees.tp > 1:
            yield tensor_exchange(layer, micro_batch, layer.num_repeated_exchanges)
        return
    if repeated.num_tp_exchanges and micro_batch.degrees.tp > 1:
        yield tensor_exchange(layer, micro_batch, repeated.num_tp_exchanges)
    if repeated.expert_exchanges and micro_batch.degrees.ep > 1:
        yield from _expert_exchanges(layer, micro_batch)


def _tensor_exchanges(layer: LayerProfile, micro_batch: ChipMicroBatch, num_calls: float) -> Iterator[CollectiveCall]:
    """Yield the exchanges of hidden states, apart those whose backward gathers nothing hides.

    With sequence parallelism the backward pass of a scatter is a gather, which the product after it waits for; that of
    a gather is a scatter, beside the weight gradient. Where a stack overlaps no gathers, only scatters run beside
    products.
    """
    if micro_batch.degrees.overlap_tp and not layer.exchanges.overlaps_gathers:
        half = tensor_exchange(layer, micro_batch, num_calls / 2)
        yield half
        yield replace(half, behind="none")
        return
    if not (layer.exchanges.gathers_before and micro_batch.degrees.sp) or micro_batch.degrees.overlap_tp is not None:
        yield tensor_exchange(layer, micro_batch, num_calls)
        return
    half = tensor_exchange(layer, micro_batch, num_calls / 2)
    yield half
    yield replace(half, overlaps=False)


def tensor_exchange(layer: LayerProfile, micro_batch: ChipMicroBatch, num_calls: float) -> CollectiveCall:
    """Return `num_calls` all-reduces of hidden states among the tensor-parallel chips.

    Each is a gather before products and a scatter after them; with `narrow_gathers` the first sends 8 bits.
    """
    degrees, rule = micro_batch.degrees, layer.exchanges
    num_bytes = micro_batch.tokens * layer.hidden_size * micro_batch.precision_bytes
    if rule.narrow_gathers and layer.narrow_products:
        num_bytes *= (1 + 1 / micro_batch.precision_bytes) / 2
    return CollectiveCall(
        kind="all_reduce", num_bytes=num_bytes, size=degrees.tp, num_calls=num_calls,
        overlaps=degrees.overlap_tp is None and rule.hides_backward,
        behind="products" if degrees.overlap_tp else "none", behind_backward=rule.overlaps_backward,
    )  # fmt: skip


def _expert_exchanges(layer: LayerProfile, micro_batch: ChipMicroBatch) -> Iterator[CollectiveCall]:
    """Yield dispatch and combine; a narrow dispatch halves one of the two, in both passes."""
    degrees, part = micro_batch.degrees, layer.feed_forward
    own = micro_batch.tokens * layer.hidden_size * micro_batch.precision_bytes / (degrees.tp if degrees.sp else 1)
    calls = 1.0 + (_NARROW_DISPATCH if degrees.narrow_dispatch else 1.0)
    behind: Literal["none", "other"] = "other" if degrees.experts.overlap else "none"
    if degrees.experts.dispatcher == "all_gather":
        yield CollectiveCall(
            kind="all_gather", num_bytes=own * degrees.ep, size=degrees.ep, num_calls=calls, behind=behind,
            num_experts=part.num_experts,
        )  # fmt: skip
    elif degrees.experts.dispatcher == "deepep":
        yield CollectiveCall(
            kind="node_all_to_all", num_bytes=own, size=degrees.ep, num_calls=calls, behind=behind,
            num_experts=part.num_experts, experts_per_token=part.experts_per_token,
            routing_groups=part.routing_groups, groups_per_token=part.groups_per_token,
        )  # fmt: skip
    else:
        sent = own * part.experts_per_token
        yield CollectiveCall(
            kind="all_to_all", num_bytes=sent, size=degrees.ep, num_calls=calls, behind=behind,
            num_experts=part.num_experts,
        )  # fmt: skip


def _context_exchanges(layer: LayerProfile, micro_batch: ChipMicroBatch) -> Iterator[CollectiveCall]:
    """Yield the exchange of a sequence among the chips that share it.

    `gather`: keys and values, backward again and their gradients (H. Dubey et al., Llama 3, 2024, section 3.3.2, and
    Transformer Engine's all-gather). `ring`: cp - 1 steps behind the core, backward with gradients (H. Liu et al., Ring
    Attention, 2023). `all_to_all`: query, key and value to heads, the result back (S. Jacobs et al., DeepSpeed Ulysses,
    2023).
    """
    degrees, core = micro_batch.degrees, layer.attention.core
    if core is None:
        return
    each = micro_batch.tokens * micro_batch.precision_bytes / degrees.tp
    pair, size, stride = each * layer.exchanged_kv_width, degrees.cp, degrees.tp
    if degrees.cp_kind == "gather":
        whole = pair * degrees.sequence_parts
        yield CollectiveCall(kind="all_gather", num_bytes=whole, size=size, stride=stride, backward_ratio=2.0)
    elif degrees.cp_kind == "ring":
        yield CollectiveCall(kind="ring", num_bytes=pair, size=size, stride=stride, behind="core", backward_ratio=2.0)
    else:
        own = each * core.num_heads
        yield CollectiveCall(kind="all_to_all", num_bytes=own * core.key_dim + pair, size=size, stride=stride)
        yield CollectiveCall(kind="all_to_all", num_bytes=own * core.value_dim, size=size, stride=stride)
