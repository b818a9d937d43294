"""Dimensions of a decoder layer and its blocks, of which its `Component`s are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["fused", "eager"]
NormKind = Literal["rms", "rms_fp32", "layer", "layer_gain"]
"""`rms` scales in the compute precision (Llama), `rms_fp32` in fp32 (Gemma, GPT-OSS); `layer`: LayerNorm, `layer_gain`
one without a bias (MPT)."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
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

    hidden_size: int
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
    rotary: bool = True
    """Whether queries and keys are rotated, which copies them."""
    partial_rotary: bool = False
    """Whether only a part of each head is rotated."""
    capped: bool = False
    """Whether scores pass through a tanh."""
    kernel: AttentionKernel = "fused"
    latent: LatentShape | None = None

    @property
    def query_width(self) -> int:
        """Elements of a token's query, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def result_width(self) -> int:
        """Elements of a token's result, over all heads."""
        return self.num_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class FeedForwardShape:
    """Dimensions of a feed-forward block."""

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False
    activation_tensors: int = 1
    """Number of tensors of the intermediate size saved between the first products and the last one's input: 1
    for a gated SiLU or GELU, 0 without a gate, more for an activation of several operations."""
    keeps_first: bool = True
    """Whether the activation keeps its input; a ReLU needs its output alone, which is the last product's input."""
    parallel: bool = False
    """Whether the block has the same normed input as attention."""
    num_experts: int = 0
    """0 for a dense block."""
    experts_per_token: int = 0
    routing_groups: int = 1
    """Equal groups of experts, of which a token first chooses `groups_per_token` (DeepSeek-V3: one group a node)."""
    groups_per_token: int = 1
    shared_size: int = 0
    """Total intermediate size of the shared experts."""
    num_shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False

    @property
    def first_products(self) -> tuple[str, ...]:
        """Names of the first products."""
        return ("gate", "up") if self.gated else ("up",)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Dimensions of one decoder layer: attention, feed-forward, and `num_norms` norms of the hidden size."""

    attention: AttentionShape
    feed_forward: FeedForwardShape
    num_norms: int = 2
    norm: NormKind = "rms"
    shared_input: bool = False
    """Whether all norms have the same input, since attention and feed-forward add to the residual in parallel."""
