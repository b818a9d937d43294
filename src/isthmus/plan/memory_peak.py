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

from isthmus.plan.profile import LayerProfile, ModelProfile, Recompute, Sharding


@dataclass(frozen=True, kw_only=True)
class Load:
    """One micro-batch on one chip: tokens (after context parallelism) and bytes of a compute element."""

    tokens: float
    sequence_length: int
    precision_bytes: int


@dataclass(frozen=True, kw_only=True)
class HeldLayer:
    """A layer of the stage with its recomputation and its cut."""

    layer: LayerProfile
    recompute: Recompute
    shard: Sharding

    def kept_bytes(self, load: Load, recompute: Recompute | None = None) -> float:
        """Return what the layer keeps for one micro-batch."""
        mode = recompute or self.recompute
        return self.layer.activation_bytes(
            load.tokens, load.sequence_length, load.precision_bytes, mode, self.shard
        )

    def working_bytes(self, load: Load) -> float:
        """Return what its backward pass holds at most beyond what it keeps: rebuilt tensors and gradients."""
        rebuilt = self.kept_bytes(load, "none") - self.kept_bytes(load)
        sizes = (load.tokens, load.sequence_length, load.precision_bytes)
        block = self.layer.feed_forward
        inner = block.working_bytes(*sizes, shard=self.shard)
        freed = block.activation_bytes(*sizes, shard=self.shard)
        gradients = max(
            inner,
            inner / 2 + _elements(self.layer, self.shard, ("down",)) * load.precision_bytes,
            _elements(self.layer, self.shard, ("gate", "up"), expert=True) * load.precision_bytes - inner,
            self.layer.attention.working_bytes(*sizes, shard=self.shard) - freed,
            self.layer.norms.working_bytes(*sizes, shard=self.shard) - freed,
        )
        gathered = load.tokens * self.layer.hidden_size * load.precision_bytes if self.shard.sp else 0.0
        return rebuilt + gradients + gathered


def largest_gradient(layer: LayerProfile, shard: Sharding) -> int:
    """Return the elements of the largest weight gradient; the first products of experts are one tensor."""
    weights = [weight.on_chip(shard) for part in layer.components for weight in part.weights]
    return max([_elements(layer, shard, ("gate", "up"), expert=True), *weights])


def _elements(layer: LayerProfile, shard: Sharding, names: tuple[str, ...], *, expert: bool = False) -> int:
    weights = [w for w in layer.feed_forward.weights if w.name in names and (w.expert or not expert)]
    return sum(weight.on_chip(shard) for weight in weights)


def working_bytes(
    profile: ModelProfile, held: Sequence[HeldLayer], load: Load, *, is_first: bool, is_last: bool
) -> float:
    """Return the most bytes alive beyond what one micro-batch keeps, over the steps of its backward pass."""
    return max(0.0, *_steps(profile, held, load, is_first=is_first, is_last=is_last))


def _steps(
    profile: ModelProfile, held: Sequence[HeldLayer], load: Load, *, is_first: bool, is_last: bool
) -> Iterator[float]:
    each, shard = load.precision_bytes, held[-1].shard
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
        yield layer.working_bytes(load) - freed
        freed += layer.kept_bytes(load)
    if is_first:
        yield table - freed
