"""Attention blocks: their weights and the tensors that autograd saves, for each kind of kernel.

The saved tensors are those of the model classes in transformers, as reported by
`torch.autograd.graph.saved_tensors_hooks` (`tests/plan/test_memory_torch.py`). Kernel `fused` is
scaled_dot_product_attention; `eager` keeps the scores in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.plan.profile.component import AttentionCore, Component, Saved, Weight
from isthmus.plan.profile.norms import NormKind, norm_parameters, norm_saved

Kernel = Literal["fused", "eager"]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Dimensions of multi-head latent attention (DeepSeek)."""

    query_rank: int | None
    """Rank of the compressed query, None if it is not compressed."""
    kv_rank: int
    """Rank of the compressed key and value."""
    rope_dim: int
    """Dimensions of a head's key with rotary embedding."""
    nope_dim: int
    """Dimensions of a head's key without rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Dimensions of an attention block."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    """Sliding window in tokens, None for full attention."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormKind | None = None
    """Norm of query and key, per head."""
    sinks: bool = False
    """Whether each head has a learned sink logit."""
    fused_qkv: bool = False
    """Whether query, key and value are views of one tensor."""
    partial_rotary: bool = False
    """Whether only a part of each head is rotated."""
    capped: bool = False
    """Whether scores pass through a tanh."""
    kernel: Kernel = "fused"
    latent: Latent | None = None

    @property
    def query(self) -> int:
        """Elements of a token's query, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def result(self) -> int:
        """Elements of a token's result, over all heads."""
        return self.num_heads * self.value_dim


def attention(shape: AttentionShape) -> Component:
    """Return the attention block: projections, optional norms of query and key, and the core."""
    weights, saved, kv_width = _latent(shape, shape.latent) if shape.latent else _grouped(shape)
    if shape.o_bias:
        weights.append(Weight(name="o_bias", vector=shape.hidden))
    if shape.sinks:
        weights.append(Weight(name="sinks", vector=shape.num_heads, cut=shape.num_heads))
    return Component(
        name="attention",
        kind="attention",
        weights=tuple(weights),
        saved=(Saved(name="projection.input", width=shape.hidden, cheap=True), *saved),
        steps=(_gradients(shape),),
        core=AttentionCore(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            key_dim=shape.head_dim,
            value_dim=shape.value_dim,
            window=shape.window,
        ),
        kv_width=kv_width,
    )


def _grouped(shape: AttentionShape) -> tuple[list[Weight], list[Saved], int]:
    """Return weights, saved tensors and cache width of multi-head or grouped-query attention."""
    hidden, heads, kv_heads = shape.hidden, shape.num_heads, shape.num_kv_heads
    query, key, value = shape.query, kv_heads * shape.head_dim, kv_heads * shape.value_dim
    weights = [
        Weight(name="q", matrix=hidden * query, vector=query * shape.qkv_bias, cut=heads),
        Weight(name="k", matrix=hidden * key, vector=key * shape.qkv_bias, cut=kv_heads),
        Weight(name="v", matrix=hidden * value, vector=value * shape.qkv_bias, cut=kv_heads),
        Weight(name="o", matrix=shape.result * hidden, cut=heads),
    ]
    value_held = query + key + value if shape.fused_qkv else value
    saved = _core_saved(shape, kv_heads=kv_heads, value_held=value_held)
    if shape.qk_norm:
        weights.append(Weight(name="qk_norm", vector=2 * norm_parameters(shape.qk_norm, shape.head_dim)))
        saved += norm_saved("q_norm", shape.qk_norm, query, cut="tp", groups=heads)
        saved += norm_saved("k_norm", shape.qk_norm, key, cut="tp", groups=kv_heads)
    return weights, saved, key + value


def _latent(shape: AttentionShape, latent: Latent) -> tuple[list[Weight], list[Saved], int]:
    """Return weights, saved tensors and cache width of latent attention, which caches the latent."""
    hidden, heads, query = shape.hidden, shape.num_heads, shape.query
    up, down = heads * (latent.nope_dim + shape.value_dim), latent.kv_rank + latent.rope_dim
    weights = [
        Weight(name="kv_a", matrix=hidden * down, vector=down * shape.qkv_bias),
        Weight(name="kv_a_norm", vector=latent.kv_rank),
        Weight(name="kv_b", matrix=latent.kv_rank * up, cut=heads),
        Weight(name="o", matrix=shape.result * hidden, cut=heads),
    ]
    saved = [
        *_core_saved(shape, kv_heads=heads, value_held=up),
        *norm_saved("kv_a_norm", "rms", latent.kv_rank),
        Saved(name="kv_b.input", width=latent.kv_rank, cheap=True),
    ]
    if latent.query_rank is None:
        return [Weight(name="q", matrix=hidden * query, cut=heads), *weights], saved, down
    rank = latent.query_rank
    weights = [
        Weight(name="q_a", matrix=hidden * rank, vector=rank * shape.qkv_bias),
        Weight(name="q_a_norm", vector=rank),
        Weight(name="q_b", matrix=rank * query, cut=heads),
        *weights,
    ]
    saved += [*norm_saved("q_a_norm", "rms", rank), Saved(name="q_b.input", width=rank, cheap=True)]
    return weights, saved, down


def _gradients(shape: AttentionShape) -> tuple[Saved, ...]:
    """Return the live tensors of the core's backward: gradients of its inputs and result, or of scores."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    hidden = Saved(name="hidden.gradients", width=2 * shape.hidden)
    if shape.kernel == "eager":
        return (hidden, Saved(name="scores.gradients", width=2 * heads, per_key=True, bytes_each=4, cut="tp"))
    return (
        hidden,
        Saved(name="query.gradients", width=shape.query + shape.result, cut="tp", pieces=heads),
        Saved(
            name="key.gradients",
            width=kv_heads * (shape.head_dim + shape.value_dim),
            cut="tp",
            pieces=kv_heads,
        ),
    )


def _core_saved(shape: AttentionShape, *, kv_heads: int, value_held: int) -> list[Saved]:
    """Return the tensors that the core saves; the value is a view of a tensor of width `value_held`."""
    heads = shape.num_heads
    query = Saved(name="q", width=shape.query, cut="tp", pieces=heads)
    result = Saved(name="core.output", width=shape.result, cut="tp", pieces=heads)
    if shape.kernel == "eager":
        return [query, *_eager_saved(shape), result]
    saved = [
        query,
        Saved(name="k", width=kv_heads * shape.head_dim, cut="tp", pieces=kv_heads),
        Saved(name="v", width=value_held, cut="tp", pieces=kv_heads),
        Saved(name="core.logsumexp", width=heads, bytes_each=4, cut="tp", pieces=heads),
        result,
    ]
    if shape.fused_qkv or shape.partial_rotary:  # the result is not contiguous, and is copied
        saved.append(Saved(name="o.input", width=shape.result, cut="tp", pieces=heads))
    if shape.window is not None:  # a window needs a mask, with which the kernel does not support grouped keys
        copied_heads = heads - kv_heads if kv_heads > 1 else 0  # a single head is repeated without a copy
        repeated = copied_heads * (shape.head_dim + shape.value_dim)
        saved += [
            Saved(name="window.mask", width=1, per_key=True, beyond=shape.window, cut="none"),
            Saved(name="window.repeated", width=repeated, beyond=shape.window, cut="tp", pieces=heads),
        ]
    return saved


def _eager_saved(shape: AttentionShape) -> list[Saved]:
    """Return the tensors that eager attention saves: repeated keys and values, and scores."""
    heads = shape.num_heads

    def rows(name: str, bytes_each: int | None, narrow: bool = False) -> Saved:
        return Saved(
            name=name, width=heads, per_key=True, bytes_each=bytes_each, cut="tp", narrow=narrow, cheap=True
        )

    saved = [
        Saved(name="k", width=heads * shape.head_dim, cut="tp", pieces=heads),
        Saved(name="v", width=shape.result, cut="tp", pieces=heads),
    ]
    if shape.capped:
        saved.append(rows("scores.capped", None))
    if shape.sinks:
        largest = Saved(name="scores.largest", width=heads, bytes_each=8, cut="tp", pieces=heads, cheap=True)
        return [*saved, rows("scores.softmax", None), largest]
    return [*saved, rows("scores.softmax", 4), rows("scores.probabilities", None, narrow=True)]
