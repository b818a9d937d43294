"""`working_bytes`: the peak memory of a backward pass above the saved activations.

A backward pass frees saved activations step by step, and each step holds its own gradients. The candidates
for the peak, relative to the end of the forward pass:

head       logits and their gradient next to the log-probabilities; then the gradient of the head's weight
norm       the fp32 tensors of the final norm
layer i    head and later layers are freed; a recomputed layer is rebuilt; its gradients are live
embedding  all activations of the micro-batch are freed; the gradient of the embedding table is live
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.plan.profile.component import Recompute, Sharding
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoad:
    """One micro-batch on one chip: tokens (divided by context parallelism) and bytes per compute element."""

    tokens: float
    sequence_length: int
    precision_bytes: int
    fused_weight_gradients: bool = False
    """Whether products add weight gradients to those of the step, without a tensor of their own."""


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """The memory of one layer on one chip."""

    dense_parameters: int
    expert_parameters: int
    activation_bytes: float
    """Activations saved per micro-batch."""
    working_bytes: float
    """Peak of the backward pass above these."""
    largest_gradient_elements: int
    """Elements of the largest weight gradient."""
    frozen_dense_parameters: int = 0
    """Those of `dense_parameters` without gradient and optimizer state."""
    frozen_expert_parameters: int = 0


def layer_memory(layer: LayerProfile, recompute: Recompute, shard: Sharding, load: MicroBatchLoad) -> LayerMemory:
    """Return the memory of `layer` on one chip, sharded by `shard` and recomputed by `recompute`."""
    weights = [weight for part in layer.components for weight in part.weights]
    sizes = (load.tokens, load.sequence_length, load.precision_bytes)
    kept, gathered_inputs = layer.activation_bytes(*sizes, recompute, shard), _gathered_input_bytes(layer, shard, load)
    rebuilt = layer.activation_bytes(*sizes, "none", shard) + gathered_inputs - kept
    if recompute == "none":
        kept, rebuilt = kept + gathered_inputs, 0.0
    gathered = load.tokens * layer.hidden_size * load.precision_bytes if shard.sp else 0.0
    return LayerMemory(
        dense_parameters=sum(weight.on_chip(shard) for weight in weights if not weight.expert),
        expert_parameters=sum(weight.on_chip(shard) for weight in weights if weight.expert),
        activation_bytes=kept,
        working_bytes=rebuilt + _peak_gradient_bytes(layer, shard, load) + gathered,
        largest_gradient_elements=max(
            _weight_elements(layer, shard, ("gate", "up"), expert=True),
            *(weight.on_chip(shard) for weight in weights if weight.trainable),
        ),
        frozen_dense_parameters=sum(w.on_chip(shard) for w in weights if not w.expert and not w.trainable),
        frozen_expert_parameters=sum(w.on_chip(shard) for w in weights if w.expert and not w.trainable),
    )


def _gathered_input_bytes(layer: LayerProfile, shard: Sharding, load: MicroBatchLoad) -> float:
    """Return the bytes of the inputs of attention and feed-forward that a layer keeps gathered, beyond its own part."""
    rule = layer.exchanges
    if not (rule.keeps_gathered and shard.sp and shard.tp > 1):
        return 0.0
    each = 1 if rule.narrow_gathers and layer.narrow_products else load.precision_bytes
    dense = 2 if not layer.feed_forward.num_experts else 1
    return dense * load.tokens * layer.hidden_size * each * (1 - 1 / shard.tp)


def _peak_gradient_bytes(layer: LayerProfile, shard: Sharding, load: MicroBatchLoad) -> float:
    """Return the peak bytes of gradients in a layer's backward pass, less the activations freed by then."""
    sizes, block = (load.tokens, load.sequence_length, load.precision_bytes), layer.feed_forward
    inner_bytes = block.working_bytes(*sizes, shard=shard)
    freed_bytes = block.activation_bytes(*sizes, shard=shard)
    weight_bytes = 0 if load.fused_weight_gradients else load.precision_bytes
    return max(
        inner_bytes,
        inner_bytes / 2 + _weight_elements(layer, shard, ("down",)) * weight_bytes,
        _weight_elements(layer, shard, ("gate", "up"), expert=True) * weight_bytes - inner_bytes,
        layer.attention.working_bytes(*sizes, shard=shard) - freed_bytes,
        layer.norms.working_bytes(*sizes, shard=shard) - freed_bytes,
    )


def _weight_elements(layer: LayerProfile, shard: Sharding, names: tuple[str, ...], *, expert: bool = False) -> int:
    weights = [w for w in layer.feed_forward.weights if w.name in names and w.trainable and (w.expert or not expert)]
    return sum(weight.on_chip(shard) for weight in weights)


def working_bytes(
    profile: ModelProfile,
    layers: Sequence[LayerMemory],
    load: MicroBatchLoad,
    shard: Sharding,
    *,
    is_first: bool,
    is_last: bool,
) -> float:
    """Return the peak bytes of a micro-batch's backward pass above its saved activations."""
    return max(0.0, *_step_bytes(profile, layers, load, shard, is_first=is_first, is_last=is_last))


def _step_bytes(
    profile: ModelProfile,
    layers: Sequence[LayerMemory],
    load: MicroBatchLoad,
    shard: Sharding,
    *,
    is_first: bool,
    is_last: bool,
) -> Iterator[float]:
    each = load.precision_bytes
    table = profile.vocab_size * profile.hidden_size / shard.tp * each
    freed = 0.0
    if is_last:
        logits = load.tokens * profile.vocab_size / shard.tp
        peak_bytes = profile.stack.loss.peak_of(shard.tp)
        trained = any(weight.trainable for weight in profile.head.weights)
        table_bytes = table if trained and not load.fused_weight_gradients else 0.0
        chunk_tokens = profile.loss_chunk_tokens(load.tokens, shard.tp)
        if chunk_tokens is None:
            yield (8 if peak_bytes is None else peak_bytes) / profile.stack.loss.chunks * logits
            yield (2 * each - 4 if peak_bytes is None else _gradient_less_kept(profile, each)) * logits + table_bytes
        else:
            yield from _chunk_step_bytes(profile, load, shard.tp, chunk_tokens, trained=trained)
        sizes = (load.tokens, load.sequence_length, each)
        freed = profile.head_kept_bytes(sizes, shard) + profile.final_norm.activation_bytes(*sizes, shard=shard)
        if is_first and profile.tied_embeddings:
            freed -= table  # the head's gradient is kept until the embedding's is added
        yield profile.final_norm.working_bytes(*sizes, shard=shard) - freed
    for layer in reversed(layers):
        yield layer.working_bytes - freed
        freed += layer.activation_bytes
    if is_first:
        trained = any(weight.trainable for weight in profile.embedding.weights)
        yield (table if trained and not load.fused_weight_gradients else 0.0) - freed


def _chunk_step_bytes(
    profile: ModelProfile, load: MicroBatchLoad, tp: int, chunk_tokens: float, *, trained: bool
) -> Iterator[float]:
    """Yield the bytes beside the kept ones of the steps of the backward pass of head and loss by chunks.

    A `trained` head sums the gradient of its weight in fp32.
    """
    each, fp32 = load.precision_bytes, 4
    table = profile.vocab_size * profile.hidden_size / tp
    logits = chunk_tokens * profile.vocab_size / tp
    always = load.tokens * profile.hidden_size * each + trained * table * fp32
    narrow = each < fp32
    yield always + logits * (fp32 + narrow * each)
    yield always + narrow * (logits * each + trained * table * each)
    yield always + narrow * trained * table * each


def stranded_bytes(profile: ModelProfile, load: MicroBatchLoad, shard: Sharding) -> float:
    """Return the bytes that the allocator has reserved beside those in use when the loss of a micro-batch peaks."""
    loss = profile.stack.loss
    return loss.stranded_of(shard.tp) / loss.chunks * load.tokens * profile.vocab_size / shard.tp


def _gradient_less_kept(profile: ModelProfile, each: int) -> float:
    """Return the bytes per logit of the logits' gradient, less what the loss kept of a logit and frees for it."""
    kept = sum(one.width * (one.element_bytes or each) for one in profile.head.saved if one.name == "log_probabilities")
    return each / profile.stack.loss.chunks - kept / profile.vocab_size
