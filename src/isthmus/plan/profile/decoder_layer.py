"""Components of a decoder layer from its dimensions: the feed-forward block, dense or experts, and the norms.

The saved tensors are those of the model classes in transformers (`tests/plan/test_memory_torch.py`); experts
run as grouped matrix products on tokens sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.plan.profile.attention import AttentionShape
from isthmus.plan.profile.component import Component, Saved, Weight
from isthmus.plan.profile.norms import NormKind, norm_parameters, norm_saved

_INDEX_BYTES = 36
"""Bytes per routed token: expert index, sort order, its inverse and token index (int64), and a weight."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardShape:
    """Dimensions of a feed-forward block."""

    hidden: int
    intermediate: int
    gated: bool = True
    bias: bool = False
    activation_tensors: int = 1
    """Number of tensors of the intermediate size saved between the first products and the last one's input: 1
    for a gated SiLU or GELU, 0 without a gate, more for an activation of several operations."""
    parallel: bool = False
    """Whether the block has the same normed input as attention."""
    num_experts: int = 0
    """0 for a dense block."""
    experts_per_token: int = 0
    shared: int = 0
    """Total intermediate size of the shared experts."""
    num_shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False

    @property
    def first(self) -> tuple[str, ...]:
        """Names of the first products."""
        return ("gate", "up") if self.gated else ("up",)


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Dimensions of one decoder layer: attention, feed-forward, and `num_norms` norms of the hidden size."""

    attention: AttentionShape
    feed_forward: FeedForwardShape
    num_norms: int = 2
    norm: NormKind = "rms"


def feed_forward(shape: FeedForwardShape) -> Component:
    """Return the feed-forward block: dense, or routed experts with a router and shared experts."""
    if not shape.num_experts:
        width = 0 if shape.parallel else shape.hidden
        read = Saved(name="feed_forward.input", width=width, cheap=True)
        return Component(
            name="feed_forward",
            kind="dense",
            weights=_dense_weights(shape, shape.intermediate),
            saved=(read, *_inner_saved(shape, shape.intermediate)),
            steps=(_gradients(shape, shape.intermediate, hidden=1, narrow_hidden=1),),
        )
    experts = shape.num_experts
    router = Weight(name="router", matrix=shape.hidden * experts, vector=experts * shape.router_bias)
    weights, saved = [router, *_expert_weights(shape)], _expert_saved(shape)
    if shape.shared:
        weights += _dense_weights(shape, shape.shared, "shared_")
        saved += _inner_saved(shape, shape.shared)
    if shape.shared_gate:
        weights.append(Weight(name="shared_gate", matrix=shape.hidden))
        saved += (Saved(name="shared.output", width=shape.hidden), Saved(name="shared.gate", width=1))
    return Component(
        name="feed_forward",
        kind="experts",
        weights=tuple(weights),
        saved=saved,
        steps=_expert_steps(shape),
        num_experts=experts,
        experts_per_token=shape.experts_per_token,
        shared_experts=shape.num_shared,
    )


def norms(shape: LayerShape) -> Component:
    """Return the norms of a layer over the hidden size, as one component."""
    hidden = shape.attention.hidden
    size = norm_parameters(shape.norm, hidden)
    weights = (Weight(name=f"norm_{index}", vector=size) for index in range(shape.num_norms))
    saved = (norm_saved(f"norm_{index}", shape.norm, hidden) for index in range(shape.num_norms))
    gradients = (Saved(name="norm.gradients", width=4.5 * hidden, bytes_each=4),)
    return Component(
        name="norms", kind="norm", weights=tuple(weights), saved=sum(saved, ()), steps=(gradients,)
    )


def _dense_weights(shape: FeedForwardShape, width: int, prefix: str = "") -> tuple[Weight, ...]:
    size = shape.hidden * width
    first = (Weight(name=prefix + n, matrix=size, vector=width * shape.bias, cut=width) for n in shape.first)
    bias = (Weight(name=f"{prefix}down_bias", vector=shape.hidden),) if shape.bias else ()
    return (*first, Weight(name=f"{prefix}down", matrix=size, cut=width), *bias)


def _expert_weights(shape: FeedForwardShape) -> tuple[Weight, ...]:
    def expert(name: str, outputs: int) -> Weight:
        return Weight(
            name=name,
            matrix=shape.hidden * shape.intermediate,
            vector=outputs * shape.bias,
            copies=shape.num_experts,
            active=shape.experts_per_token,
            cut=shape.intermediate,
            expert=True,
        )

    return (*(expert(name, shape.intermediate) for name in shape.first), expert("down", shape.hidden))


def _inner_saved(shape: FeedForwardShape, width: int, *, routed: bool = False) -> tuple[Saved, ...]:
    """Return the tensors saved between the first products and the last, including its input."""
    kept = shape.activation_tensors
    first = Saved(name="first.output", width=len(shape.first) * width, routed=routed, cut="tp")
    between = Saved(name="activation", width=kept * width, routed=routed, cut="tp", cheap=True)
    product = Saved(name="down.input", width=width, routed=routed, cut="tp", cheap=True)
    return (first, between, product) if kept else (first, product)


def _gradients(
    shape: FeedForwardShape, width: int, *, hidden: int, narrow_hidden: int, routed: bool = False
) -> tuple[Saved, ...]:
    """Return the gradients of a block: two of the intermediate size, and multiples of the hidden size."""
    return (
        Saved(name="inner.gradients", width=2 * width, routed=routed, cut="tp"),
        Saved(name="hidden.gradients", width=hidden * shape.hidden),
        Saved(name="hidden.narrow", width=narrow_hidden * shape.hidden, narrow=True),
    )


def _expert_steps(shape: FeedForwardShape) -> tuple[tuple[Saved, ...], ...]:
    """Return the two steps that may be the peak: inside the experts, and the sum of their outputs."""

    def routed(name: str, times: int, narrow: bool = False) -> Saved:
        return Saved(name=name, width=times * shape.hidden, routed=True, cut="none", narrow=narrow)

    inside = _gradients(shape, shape.intermediate, hidden=1, narrow_hidden=1, routed=True)
    return (
        (*inside, routed("down.output", -1), routed("down.gradient", 2, narrow=True)),
        (routed("combine.gradients", 3), Saved(name="hidden.gradients", width=2 * shape.hidden)),
    )


def _expert_saved(shape: FeedForwardShape) -> tuple[Saved, ...]:
    return (
        Saved(name="feed_forward.input", width=shape.hidden),
        Saved(name="router.probabilities", width=shape.num_experts, bytes_each=4),
        Saved(name="routing", width=1, bytes_each=_INDEX_BYTES, routed=True, cut="none"),
        Saved(name="dispatch", width=shape.hidden, routed=True, cut="none"),
        *_inner_saved(shape, shape.intermediate, routed=True),
        Saved(name="down.output", width=shape.hidden, routed=True, cut="none"),
    )
