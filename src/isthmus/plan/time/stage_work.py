"""`Work`: the operations, memory traffic and collectives of one forward pass of a micro-batch on a chip.

They depend only on the model and its sharding; `isthmus.plan.time.stage_time` converts them to seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from isthmus.plan.memory.stage_memory import Degrees
from isthmus.plan.profile.component import Component, Sharding, Weight
from isthmus.plan.profile.model_profile import LayerProfile, ModelProfile

LOGIT_BYTES = (48, 32)
"""Bytes moved per logit, forward and backward, by an unfused cross-entropy in fp32."""

_SECOND = ("o", "down", "shared_down")
"""Weights whose products end in a tensor-parallel all-reduce; the gradients of the others can overlap one."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Calls of a collective among `size` chips that are `stride` positions apart."""

    kind: Literal["all_reduce", "all_gather", "all_to_all"]
    num_bytes: float
    """Bytes that each chip has after an all-gather, or that each chip contributes to the others."""
    size: int
    stride: int = 1
    times: float = 1.0
    """Number of calls."""
    hides: bool = False
    """Whether its backward counterpart overlaps with weight gradients."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations, bytes and collectives of a forward pass on one chip."""

    matmul_flops: float = 0.0
    first_flops: float = 0.0
    """The part of `matmul_flops` whose weight gradients can overlap tensor-parallel collectives."""
    matmul_bytes: float = 0.0
    """Operands and results of the matrix products."""
    core_flops: float = 0.0
    """Operations of the attention core."""
    core_backward: float = 2.0
    """Backward over forward operations of the attention core."""
    moved_bytes: float = 0.0
    """Other memory traffic."""
    launches: float = 0.0
    """Host launches, in layers."""
    exchanges: tuple[Exchange, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a micro-batch that one chip processes; `tokens` is divided by context parallelism."""

    tokens: float
    sequence_length: int
    precision_bytes: int
    degrees: Degrees


def layer_work(layer: LayerProfile, share: Share) -> Work:
    """Return the forward work of one decoder layer."""
    degrees = share.degrees
    shard = degrees.sharding(layer)
    sizes = (share.tokens, share.sequence_length, share.precision_bytes)
    kept = sum(part.activation_bytes(*sizes, shard=shard) for part in layer.components)
    hidden_bytes = share.tokens * layer.hidden_size * share.precision_bytes
    residual = 6 * hidden_bytes / (degrees.tp if degrees.sp else 1)  # two additions: two reads, one write
    counts = [_products(part, shard, share) for part in layer.components]
    core, core_backward = _core(layer.attention, degrees, share)
    return Work(
        matmul_flops=sum(one[0] for one in counts),
        first_flops=sum(one[1] for one in counts),
        matmul_bytes=sum(one[2] for one in counts),
        core_flops=core,
        core_backward=core_backward,
        moved_bytes=2 * kept + residual,
        launches=1.0,
        exchanges=tuple(_layer_exchanges(layer, share, hidden_bytes)),
    )


def _products(part: Component, shard: Sharding, share: Share) -> tuple[float, float, float]:
    """Return `matmul_flops`, `first_flops` and `matmul_bytes` of a component."""
    flops = first = moved = 0.0
    for weight in part.weights:
        if not weight.matrix:
            continue
        each, rows = _cut_matrix(weight, shard, share)
        flops += 2 * each * rows
        first += 0.0 if weight.name in _SECOND else 2 * each * rows
        inner = part_width(part)
        copies = -(-weight.copies // shard.ep) if weight.expert else max(weight.copies, 1)
        moved += share.precision_bytes * (copies * each + rows * (inner + each / inner))
    return flops, first, moved


def part_width(part: Component) -> float:
    """Return the width of a component's input, from its saved tensors."""
    named = ("projection.input", "feed_forward.input", "head.input")
    return next((saved.width for saved in part.saved if saved.name in named), 1.0)


def _cut_matrix(weight: Weight, shard: Sharding, share: Share) -> tuple[float, float]:
    """Return the elements of a weight's matrix on a chip, and the rows (tokens) that it multiplies."""
    pieces = min(shard.etp if weight.expert else shard.tp, weight.cut)
    rows = share.tokens * weight.active
    if weight.expert and shard.ep > 1:
        routed = weight.active if shard.routed_per_token is None else shard.routed_per_token
        rows = share.tokens * routed / (shard.tp if shard.sp else 1)
    return weight.matrix / pieces, rows


def _core(attention: Component, degrees: Degrees, share: Share) -> tuple[float, float]:
    """Return the operations of the attention core on one chip, and its backward over forward operations.

    An eager kernel computes all scores, masked or not; a fused kernel skips masked ones and recomputes the
    scores in its backward pass (2.5 forwards).
    """
    core = attention.core
    if core is None:
        return 0.0, 2.0
    eager = any(saved.name.startswith("scores.") for saved in attention.saved)
    pieces = min(degrees.tp, core.num_heads)
    if not eager:
        return core.forward_flops(share.sequence_length, share.tokens) / pieces, 2.5
    per_key = 2 * core.num_heads * (core.key_dim + core.value_dim)
    return share.tokens * per_key * share.sequence_length / pieces, 2.0


def _layer_exchanges(layer: LayerProfile, share: Share, hidden_bytes: float) -> Iterable[Exchange]:
    """Yield the collectives of a forward pass; a backward pass has the same."""
    degrees, part = share.degrees, layer.feed_forward
    if degrees.tp > 1:
        dealt = part.num_experts > 0 and degrees.ep > 1
        times = 1.0 if dealt and not part.shared_experts else 2.0
        yield Exchange(kind="all_reduce", num_bytes=hidden_bytes, size=degrees.tp, times=times, hides=True)
    if degrees.ep > 1 and part.num_experts:
        sent = hidden_bytes * part.experts_per_token / (degrees.tp if degrees.sp else 1)
        yield Exchange(kind="all_to_all", num_bytes=sent, size=degrees.ep, times=2.0)
    if degrees.cp > 1 and layer.attention.core:
        kv_bytes = share.tokens * degrees.cp * layer.attention.kv_width * share.precision_bytes / degrees.tp
        yield Exchange(kind="all_gather", num_bytes=kv_bytes, size=degrees.cp, stride=degrees.tp)


def head_work(profile: ModelProfile, share: Share) -> Work:
    """Return the forward work of final norm, head and loss on one chip."""
    shard = share.degrees.sharding(profile.layers[0])
    flops, first, moved = _products(profile.head, shard, share)
    logits = share.tokens * profile.vocab_size / share.degrees.tp
    hidden_bytes = share.tokens * profile.hidden_size * share.precision_bytes
    exchanges: tuple[Exchange, ...] = ()
    if share.degrees.tp > 1:
        exchanges = (
            Exchange(kind="all_reduce", num_bytes=hidden_bytes, size=share.degrees.tp, times=0.5, hides=True),
        )
    return Work(
        matmul_flops=flops,
        first_flops=first,
        matmul_bytes=moved,
        moved_bytes=LOGIT_BYTES[0] * logits + 4 * hidden_bytes,
        exchanges=exchanges,
    )


def embedding_work(profile: ModelProfile, share: Share) -> Work:
    """Return the forward work of the embedding: the lookup, and the sum over tensor-parallel chips."""
    hidden_bytes = share.tokens * profile.hidden_size * share.precision_bytes
    exchanges: tuple[Exchange, ...] = ()
    if share.degrees.tp > 1:
        exchanges = (Exchange(kind="all_reduce", num_bytes=hidden_bytes, size=share.degrees.tp, times=0.5),)
    return Work(moved_bytes=2 * hidden_bytes, exchanges=exchanges)
