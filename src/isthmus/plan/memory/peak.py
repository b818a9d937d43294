"""The memory above what is kept: which step of the backward pass holds most, and by how much.

While a micro-batch runs backward, what it kept is freed step by step, and each step has gradients of its own
alive. The steps compared, each relative to the moment when everything is kept (the end of the forward pass):

head       logits and their gradient beside the log-probabilities; then the gradient of the head's weight
norm       the final norm's fp32 work
layer i    the head and later layers are freed; a recomputed layer is rebuilt; its gradients are alive
embedding  everything of this micro-batch is freed; the gradient of the table is alive
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.plan.profile.model_profile import LayerProfile, ModelProfile, Recompute, Sharding


@dataclass(frozen=True, kw_only=True)
class Load:
    """One micro-batch on one chip: tokens (after context parallelism) and bytes of a compute element."""

    tokens: float
    sequence_length: int
    precision_bytes: int


@dataclass(frozen=True, kw_only=True)
class HeldLayer:
    """What one layer costs a chip: parameters here, bytes kept per micro-batch, bytes alive while it runs
    backward beyond those, and the elements of its largest weight gradient.
    """

    dense_parameters: int
    expert_parameters: int
    kept_bytes: float
    working_bytes: float
    largest_gradient: int


def held_layer(layer: LayerProfile, recompute: Recompute, shard: Sharding, load: Load) -> HeldLayer:
    """Return what `layer` costs a chip that holds it as `shard` says, recomputed as `recompute` says."""
    weights = [weight for part in layer.components for weight in part.weights]
    sizes = (load.tokens, load.sequence_length, load.precision_bytes)
    kept = layer.activation_bytes(*sizes, recompute, shard)
    rebuilt = layer.activation_bytes(*sizes, "none", shard) - kept
    gathered = load.tokens * layer.hidden_size * load.precision_bytes if shard.sp else 0.0
    return HeldLayer(
        dense_parameters=sum(weight.on_chip(shard) for weight in weights if not weight.expert),
        expert_parameters=sum(weight.on_chip(shard) for weight in weights if weight.expert),
        kept_bytes=kept,
        working_bytes=rebuilt + _gradients(layer, shard, load) + gathered,
        largest_gradient=max(
            _elements(layer, shard, ("gate", "up"), expert=True),
            *(weight.on_chip(shard) for weight in weights),
        ),
    )


def _gradients(layer: LayerProfile, shard: Sharding, load: Load) -> float:
    """Return the gradients alive in the fullest step of a layer's backward pass, less what is freed."""
    sizes, block = (load.tokens, load.sequence_length, load.precision_bytes), layer.feed_forward
    inner = block.working_bytes(*sizes, shard=shard)
    freed = block.activation_bytes(*sizes, shard=shard)
    return max(
        inner,
        inner / 2 + _elements(layer, shard, ("down",)) * load.precision_bytes,
        _elements(layer, shard, ("gate", "up"), expert=True) * load.precision_bytes - inner,
        layer.attention.working_bytes(*sizes, shard=shard) - freed,
        layer.norms.working_bytes(*sizes, shard=shard) - freed,
    )


def _elements(layer: LayerProfile, shard: Sharding, names: tuple[str, ...], *, expert: bool = False) -> int:
    weights = [w for w in layer.feed_forward.weights if w.name in names and (w.expert or not expert)]
    return sum(weight.on_chip(shard) for weight in weights)


def working_bytes(
    profile: ModelProfile,
    held: Sequence[HeldLayer],
    load: Load,
    shard: Sharding,
    *,
    is_first: bool,
    is_last: bool,
) -> float:
    """Return the most bytes alive beyond what one micro-batch keeps, over the steps of its backward pass."""
    return max(0.0, *_steps(profile, held, load, shard, is_first=is_first, is_last=is_last))


def _steps(
    profile: ModelProfile,
    held: Sequence[HeldLayer],
    load: Load,
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
        yield 8 * logits
        yield (2 * each - 4) * logits + table
        sizes = (load.tokens, load.sequence_length, each)
        ends = (profile.head, profile.final_norm)
        freed = sum(part.activation_bytes(*sizes, shard=shard) for part in ends)
        if is_first and profile.tied_embeddings:
            freed -= table  # the head's part of the gradient waits for the embedding's
        yield profile.final_norm.working_bytes(*sizes, shard=shard) - freed
    for layer in reversed(held):
        yield layer.working_bytes - freed
        freed += layer.kept_bytes
    if is_first:
        yield table - freed
