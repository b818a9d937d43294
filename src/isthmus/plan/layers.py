"""From the dimensions of a layer to its components: the weights it has and the tensors autograd keeps.

The kept tensors are those of the model classes in transformers with fused attention (`sdpa`), as measured
with `torch.autograd.graph.saved_tensors_hooks` (`tests/plan/test_memory_torch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.plan.component import AttentionCore, Component, Saved, Weight

NormKind = Literal["rms", "rms_fp32", "layer"]
"""`rms` scales in the compute precision (Llama), `rms_fp32` in fp32 (Gemma, GPT-OSS), `layer` has mean and
bias.
"""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek): ranks of the compressed query (None: not compressed) and
    key/value.
    """

    query_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Dimensions of an attention block; `qk_norm` is per head, `sinks` adds one learned logit per head."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormKind | None = None
    sinks: bool = False
    latent: Latent | None = None


@dataclass(frozen=True, kw_only=True)
class FeedForwardShape:
    """Dimensions of a feed-forward block: dense where `num_experts` is 0; `shared` is the shared experts'
    width.
    """

    hidden: int
    intermediate: int
    gated: bool = True
    bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    shared: int = 0
    num_shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Dimensions of one decoder layer: attention, feed-forward, and `num_norms` norms of the hidden size."""

    attention: AttentionShape
    feed_forward: FeedForwardShape
    num_norms: int = 2
    norm: NormKind = "rms"


def norm_parameters(kind: NormKind, width: int) -> int:
    """Return the parameters of one norm over `width` elements."""
    return 2 * width if kind == "layer" else width


def norm_saved(
    name: str, kind: NormKind, width: int, *, cut: Literal["tp", "sp", "none"] = "sp", groups: int = 1
) -> tuple[Saved, ...]:
    """Return what a norm over `width` keeps: its input, the statistics of `groups` rows, and the scaled
    input.
    """
    if kind == "layer":
        return (
            Saved(name=f"{name}.input", width=width, cut=cut),
            Saved(name=f"{name}.statistics", width=2 * groups, bytes_each=4, cut=cut),
        )
    scaled = 4 if kind == "rms_fp32" else None
    return (
        Saved(name=f"{name}.input", width=width, bytes_each=4, cut=cut),
        Saved(name=f"{name}.statistics", width=groups, bytes_each=4, cut=cut),
        Saved(name=f"{name}.scaled", width=width, bytes_each=scaled, cut=cut, cheap=True),
    )


def attention(shape: AttentionShape) -> Component:
    """Return the attention block: projections, optional norms of query and key, and the core."""
    core = AttentionCore(
        num_heads=shape.num_heads, key_dim=shape.head_dim, value_dim=shape.value_dim, window=shape.window
    )
    if shape.latent is not None:
        return _latent_attention(shape, shape.latent, core)
    hidden, heads, kv_heads = shape.hidden, shape.num_heads, shape.num_kv_heads
    query, key, value = heads * shape.head_dim, kv_heads * shape.head_dim, kv_heads * shape.value_dim
    result = heads * shape.value_dim
    weights = [
        Weight(name="q", matrix=hidden * query, vector=query * shape.qkv_bias, cut=heads),
        Weight(name="k", matrix=hidden * key, vector=key * shape.qkv_bias, cut=kv_heads),
        Weight(name="v", matrix=hidden * value, vector=value * shape.qkv_bias, cut=kv_heads),
        Weight(name="o", matrix=result * hidden, cut=heads),
    ]
    if shape.o_bias:
        weights.append(Weight(name="o_bias", vector=hidden))
    if shape.sinks:
        weights.append(Weight(name="sinks", vector=heads, cut=heads))
    saved = [
        Saved(name="projection.input", width=hidden, cheap=True),
        *_core_saved(heads, query, kv_heads, key, value, result),
    ]
    if shape.qk_norm:
        weights.append(Weight(name="qk_norm", vector=2 * norm_parameters(shape.qk_norm, shape.head_dim)))
        saved += norm_saved("q_norm", shape.qk_norm, query, cut="tp", groups=heads)
        saved += norm_saved("k_norm", shape.qk_norm, key, cut="tp", groups=kv_heads)
    return Component(
        name="attention",
        kind="attention",
        weights=tuple(weights),
        saved=tuple(saved),
        core=core,
        kv_width=key + value,
    )


def _core_saved(
    heads: int, query: int, kv_heads: int, key: int, value: int, result: int
) -> tuple[Saved, ...]:
    return (
        Saved(name="q", width=query, cut="tp", pieces=heads),
        Saved(name="k", width=key, cut="tp", pieces=kv_heads),
        Saved(name="v", width=value, cut="tp", pieces=kv_heads),
        Saved(name="core.output", width=result, cut="tp", pieces=heads),
        Saved(name="core.logsumexp", width=heads, bytes_each=4, cut="tp", pieces=heads),
    )


def _latent_attention(shape: AttentionShape, latent: Latent, core: AttentionCore) -> Component:
    hidden, heads = shape.hidden, shape.num_heads
    query, result = heads * shape.head_dim, heads * shape.value_dim
    up = heads * (latent.nope_dim + shape.value_dim)
    down = latent.kv_rank + latent.rope_dim
    weights = [
        Weight(name="kv_a", matrix=hidden * down, vector=down * shape.qkv_bias),
        Weight(name="kv_a_norm", vector=latent.kv_rank),
        Weight(name="kv_b", matrix=latent.kv_rank * up, cut=heads),
        Weight(name="o", matrix=result * hidden, cut=heads),
    ]
    saved = [
        Saved(name="projection.input", width=hidden, cheap=True),
        *_core_saved(heads, query, heads, query, result, result),
        *norm_saved("kv_a_norm", "rms", latent.kv_rank),
        Saved(name="kv_b.input", width=latent.kv_rank, cheap=True),
    ]
    if latent.query_rank is None:
        weights.insert(0, Weight(name="q", matrix=hidden * query, cut=heads))
    else:
        rank = latent.query_rank
        weights[:0] = [
            Weight(name="q_a", matrix=hidden * rank, vector=rank * shape.qkv_bias),
            Weight(name="q_a_norm", vector=rank),
            Weight(name="q_b", matrix=rank * query, cut=heads),
        ]
        saved += norm_saved("q_a_norm", "rms", rank)
        saved.append(Saved(name="q_b.input", width=rank, cheap=True))
    if shape.o_bias:
        weights.append(Weight(name="o_bias", vector=hidden))
    return Component(
        name="attention",
        kind="attention",
        weights=tuple(weights),
        saved=tuple(saved),
        core=core,
        kv_width=down,
    )


def feed_forward(shape: FeedForwardShape) -> Component:
    """Return the feed-forward block: dense, or routed experts with a router and shared experts."""
    if not shape.num_experts:
        return Component(
            name="feed_forward",
            kind="dense",
            weights=_dense_weights(shape, shape.intermediate),
            saved=_dense_saved(shape, shape.intermediate),
        )
    hidden, width, experts = shape.hidden, shape.intermediate, shape.num_experts
    names = ("gate", "up") if shape.gated else ("up",)
    router = Weight(name="router", matrix=hidden * experts, vector=experts * shape.router_bias)
    first = (_expert(shape, name, hidden * width, width) for name in names)
    weights = [router, *first, _expert(shape, "down", width * hidden, hidden)]
    saved = _expert_saved(shape)
    if shape.shared:
        weights += (_named(weight, "shared") for weight in _dense_weights(shape, shape.shared))
        saved += _dense_saved(shape, shape.shared)[1:]
    if shape.shared_gate:
        weights.append(Weight(name="shared_gate", matrix=hidden))
        saved += (Saved(name="shared.output", width=hidden), Saved(name="shared.gate", width=1))
    return Component(
        name="feed_forward",
        kind="experts",
        weights=tuple(weights),
        saved=saved,
        num_experts=experts,
        experts_per_token=shape.experts_per_token,
        shared_experts=shape.num_shared,
    )


def _expert(shape: FeedForwardShape, name: str, matrix: int, bias: int) -> Weight:
    return Weight(
        name=name,
        matrix=matrix,
        vector=bias * shape.bias,
        copies=shape.num_experts,
        active=shape.experts_per_token,
        cut=shape.intermediate,
        expert=True,
    )


def _named(weight: Weight, prefix: str) -> Weight:
    return Weight(name=f"{prefix}_{weight.name}", matrix=weight.matrix, vector=weight.vector, cut=weight.cut)


def _dense_weights(shape: FeedForwardShape, width: int) -> tuple[Weight, ...]:
    hidden = shape.hidden
    names = ("gate", "up") if shape.gated else ("up",)
    first = (Weight(name=n, matrix=hidden * width, vector=width * shape.bias, cut=width) for n in names)
    bias = (Weight(name="down_bias", vector=hidden),) if shape.bias else ()
    return (*first, Weight(name="down", matrix=width * hidden, cut=width), *bias)


def _dense_saved(shape: FeedForwardShape, width: int) -> tuple[Saved, ...]:
    first = Saved(name="feed_forward.input", width=shape.hidden, cheap=True)
    if not shape.gated:
        return (
            first,
            Saved(name="up.output", width=width, cut="tp"),
            Saved(name="activation", width=width, cut="tp", cheap=True),
        )
    return (
        first,
        Saved(name="gate.output", width=width, cut="tp"),
        Saved(name="up.output", width=width, cut="tp"),
        Saved(name="activation", width=width, cut="tp", cheap=True),
        Saved(name="product", width=width, cut="tp", cheap=True),
    )


def _expert_saved(shape: FeedForwardShape) -> tuple[Saved, ...]:
    hidden, width = shape.hidden, shape.intermediate
    return (
        Saved(name="feed_forward.input", width=hidden),
        Saved(name="router.probabilities", width=shape.num_experts, bytes_each=4),
        Saved(name="dispatch", width=hidden, routed=True, cut="none"),
        Saved(name="gate_up.output", width=(2 if shape.gated else 1) * width, routed=True, cut="tp"),
        Saved(name="activation", width=width, routed=True, cut="tp", cheap=True),
        Saved(name="product", width=width, routed=True, cut="tp", cheap=True),
        Saved(name="down.output", width=hidden, routed=True, cut="none"),
    )


def norms(shape: LayerShape) -> Component:
    """Return the norms of a layer over the hidden size, as one component."""
    hidden = shape.attention.hidden
    weights = tuple(
        Weight(name=f"norm_{index}", vector=norm_parameters(shape.norm, hidden))
        for index in range(shape.num_norms)
    )
    saved: tuple[Saved, ...] = ()
    for index in range(shape.num_norms):
        saved += norm_saved(f"norm_{index}", shape.norm, hidden)
    return Component(name="norms", kind="norm", weights=weights, saved=saved)
