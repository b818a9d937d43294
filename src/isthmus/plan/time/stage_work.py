"""`ChipWork`: the operations, memory traffic and collectives of one forward pass of a micro-batch on a chip.

They depend only on the model and its sharding; `isthmus.plan.time.stage_time` converts them to seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.component import Component, Sharding, Weight, input_width
from isthmus.plan.profile.element_traffic import element_traffic
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.time.layer_exchanges import ChipMicroBatch, CollectiveCall, layer_exchanges, repeated_exchanges

_REDUCED_WEIGHTS = ("o", "down", "shared_down")
"""Weights whose products end in a tensor-parallel all-reduce; the gradients of the others can overlap one."""


@dataclass(frozen=True, kw_only=True)
class ChipWork:
    """Operations, bytes and collectives of a forward pass on one chip."""

    matmul_flops: float = 0.0
    overlapping_flops: float = 0.0
    """The part of `matmul_flops` whose weight gradients can overlap tensor-parallel collectives."""
    matmul_bytes: float = 0.0
    """Operands and results of the matrix products."""
    attention_flops: float = 0.0
    """Operations of the attention core."""
    attention_backward_ratio: float = 2.0
    """Backward over forward operations of the attention core."""
    shares_context: bool = False
    """Whether chips share the sequence of the attention core."""
    attention_kernel: str = "any"
    """The kernel of the attention core, by which chips state sustained rates."""
    keys_per_query: float = 1.0
    """Mean keys of a query in one call of the attention kernel."""
    elements_per_head: float = 0.0
    """Mean size of a head's key and value."""
    repeated_flops: float = 0.0
    """The part of `matmul_flops` that selective recomputation repeats."""
    repeats_attention: bool = True
    """Whether selective recomputation repeats the attention core."""
    moved_bytes: float = 0.0
    """Other memory traffic."""
    moved_back_bytes: float | None = None
    """That of the backward pass; None: twice that of the forward pass."""
    repeated_bytes: float | None = None
    """The part of `moved_bytes` that selective recomputation repeats; None: half of it."""
    repeated_collectives: tuple[CollectiveCall, ...] = ()
    """Collectives that selective recomputation repeats."""
    frozen_flops: float = 0.0
    """The part of `matmul_flops` whose weights have no gradient."""
    num_launches: float = 0.0
    """Host launches, in layers."""
    collectives: tuple[CollectiveCall, ...] = field(default=())


def layer_work(layer: LayerProfile, micro_batch: ChipMicroBatch) -> ChipWork:
    """Return the forward work of one decoder layer."""
    degrees = micro_batch.degrees
    shard = degrees.sharding(layer)
    sizes = (micro_batch.tokens, micro_batch.sequence_length, micro_batch.precision_bytes)
    kept = sum(part.activation_bytes(*sizes, shard=shard) for part in layer.components)
    hidden_bytes = micro_batch.tokens * layer.hidden_size * micro_batch.precision_bytes
    residual = 6 * hidden_bytes / (degrees.tp if degrees.sp else 1)  # two additions: two reads, one write
    counts = [_matmul_work(part, shard, micro_batch) for part in layer.components]
    written, written_back = element_traffic(layer, sizes, shard, 2 * kept * layer.traffic_ratio)
    repeated = written * (layer.repeated_traffic_share if layer.repeated is None else layer.repeated.traffic_share)
    core, core_backward = _attention_core_work(layer.attention, degrees, micro_batch)
    merged, merged_back = _merged_bytes(layer, micro_batch)
    return ChipWork(
        matmul_flops=sum(one[0] for one in counts),
        overlapping_flops=sum(one[1] for one in counts),
        matmul_bytes=sum(one[2] for one in counts),
        attention_flops=core,
        attention_backward_ratio=core_backward,
        shares_context=degrees.cp > 1,
        attention_kernel=layer.attention_kernel,
        keys_per_query=_keys_per_call(layer, micro_batch),
        elements_per_head=layer.attention.core.mean_dim if layer.attention.core else 0.0,
        repeated_flops=sum(
            _repeated_flops(part, layer.repeated_weights, shard, micro_batch) for part in layer.components
        ),
        repeats_attention=layer.repeats_attention,
        moved_bytes=written + residual + merged,
        moved_back_bytes=written_back + 2 * residual + merged_back,
        repeated_bytes=repeated + (0.0 if layer.repeated else residual * layer.repeated_traffic_share),
        repeated_collectives=tuple(repeated_exchanges(layer, micro_batch)),
        frozen_flops=sum(_frozen_flops(part, shard, micro_batch) for part in layer.components),
        num_launches=layer.launch_ratio * (1 + layer.expert_launch_ratio * _experts_on_chip(layer, degrees)),
        collectives=tuple(layer_exchanges(layer, micro_batch)),
    )


def _merged_bytes(layer: LayerProfile, micro_batch: ChipMicroBatch) -> tuple[float, float]:
    """Return the bytes that merges of the attention of the blocks of other chips move, forward and backward."""
    core, degrees, rule = layer.attention.core, micro_batch.degrees, layer.exchanges
    if core is None or degrees.cp_kind == "all_to_all":
        return 0.0, 0.0
    elements = micro_batch.tokens * core.num_heads * core.value_dim / min(degrees.tp, core.num_heads)
    merges = (degrees.cp - 1) * elements
    return rule.merge_forward_bytes * merges, rule.merge_backward_bytes * merges


def _keys_per_call(layer: LayerProfile, micro_batch: ChipMicroBatch) -> float:
    """Return the mean keys of a query in one call of the attention kernel; some call it for the block of each chip."""
    core, degrees = layer.attention.core, micro_batch.degrees
    if core is None:
        return 1.0
    by_blocks = degrees.cp_kind == "ring" or (degrees.cp_kind == "gather" and layer.exchanges.merge_forward_bytes)
    return core.mean_keys(micro_batch.document_length) / (degrees.cp if by_blocks else 1)


def _experts_on_chip(layer: LayerProfile, degrees: StageDegrees) -> int:
    return -(-layer.feed_forward.num_experts // degrees.ep)


def _matmul_work(part: Component, shard: Sharding, micro_batch: ChipMicroBatch) -> tuple[float, float, float]:
    """Return `matmul_flops`, `overlapping_flops` and `matmul_bytes` of a component."""
    flops = first = moved = 0.0
    for weight in part.weights:
        if not weight.matrix_elements:
            continue
        each, rows = _chip_matrix(weight, shard, micro_batch)
        flops += 2 * each * rows
        first += 0.0 if weight.name in _REDUCED_WEIGHTS else 2 * each * rows
        inner = input_width(part)
        copies = -(-weight.copies // shard.ep) if weight.expert else max(weight.copies, 1)
        moved += micro_batch.precision_bytes * (copies * each + rows * (inner + each / inner))
    return flops, first, moved


def _repeated_flops(part: Component, names: tuple[str, ...], shard: Sharding, micro_batch: ChipMicroBatch) -> float:
    """Return the operations of the products that selective recomputation repeats."""
    chosen = (_chip_matrix(one, shard, micro_batch) for one in part.weights if one.name in names)
    return sum(2 * each * rows for each, rows in chosen)


def _frozen_flops(part: Component, shard: Sharding, micro_batch: ChipMicroBatch) -> float:
    """Return the operations of the products whose weights have no gradient."""
    frozen = (_chip_matrix(one, shard, micro_batch) for one in part.weights if not one.trainable)
    return sum(2 * each * rows for each, rows in frozen)


def _chip_matrix(weight: Weight, shard: Sharding, micro_batch: ChipMicroBatch) -> tuple[float, float]:
    """Return the elements of a weight's matrix on a chip, and the rows (tokens) that it multiplies."""
    pieces = min(shard.etp if weight.expert else shard.tp, weight.max_pieces)
    rows = micro_batch.tokens * weight.active_copies
    if weight.expert and shard.ep > 1:
        routed = weight.active_copies if shard.routed_per_token is None else shard.routed_per_token
        rows = micro_batch.tokens * routed / (shard.tp if shard.sp else 1)
    return weight.matrix_elements / pieces, rows


def _attention_core_work(
    attention: Component, degrees: StageDegrees, micro_batch: ChipMicroBatch
) -> tuple[float, float]:
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
        return core.forward_flops(micro_batch.document_length, micro_batch.tokens) / pieces, 2.5
    per_key = 2 * core.num_heads * (core.key_dim + core.value_dim)
    return micro_batch.tokens * per_key * micro_batch.sequence_length / pieces, 2.0


def head_work(profile: ModelProfile, micro_batch: ChipMicroBatch) -> ChipWork:
    """Return the forward work of final norm, head and loss on one chip."""
    shard = micro_batch.degrees.sharding(profile.layers[0])
    flops, first, moved = _matmul_work(profile.head, shard, micro_batch)
    logits = micro_batch.tokens * profile.vocab_size / micro_batch.degrees.tp
    hidden_bytes = micro_batch.tokens * profile.hidden_size * micro_batch.precision_bytes
    exchanges: tuple[CollectiveCall, ...] = ()
    if micro_batch.degrees.tp > 1:
        exchanges = (
            CollectiveCall(
                kind="all_reduce",
                num_bytes=hidden_bytes,
                size=micro_batch.degrees.tp,
                num_calls=0.5,
                overlaps=profile.stack.exchanges.hides_backward,
            ),
        )
    return ChipWork(
        matmul_flops=flops,
        overlapping_flops=first,
        frozen_flops=_frozen_flops(profile.head, shard, micro_batch),
        repeated_flops=flops,
        repeats_attention=False,
        repeated_bytes=0.0,
        matmul_bytes=moved,
        moved_bytes=profile.stack.loss.forward_bytes * logits + 4 * hidden_bytes,
        collectives=exchanges,
    )


def embedding_work(profile: ModelProfile, micro_batch: ChipMicroBatch) -> ChipWork:
    """Return the forward work of the embedding: the lookup, and the sum over tensor-parallel chips."""
    hidden_bytes = micro_batch.tokens * profile.hidden_size * micro_batch.precision_bytes
    exchanges: tuple[CollectiveCall, ...] = ()
    if micro_batch.degrees.tp > 1:
        exchanges = (
            CollectiveCall(kind="all_reduce", num_bytes=hidden_bytes, size=micro_batch.degrees.tp, num_calls=0.5),
        )
    return ChipWork(moved_bytes=2 * hidden_bytes, collectives=exchanges)
