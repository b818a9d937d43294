"""Components of a decoder layer from its dimensions: the feed-forward block, dense or experts, and the norms.

The saved tensors are those of the model classes in transformers (`tests/plan/test_memory_torch.py`); experts
run as grouped matrix products on tokens sorted by expert.
"""

from __future__ import annotations

from isthmus.plan.profile.component import Component, SavedTensor, Weight
from isthmus.plan.profile.layer_shapes import FeedForwardShape, LayerShape
from isthmus.plan.profile.norms import norm_parameters, norm_saved_tensors

_INDEX_BYTES = 36
"""Bytes per routed token: expert index, sort order, its inverse and token index (int64), and a weight."""


def feed_forward_component(shape: FeedForwardShape) -> Component:
    """Return the feed-forward block: dense, or routed experts with a router and shared experts."""
    if not shape.num_experts:
        width = 0 if shape.parallel else shape.hidden_size
        read = SavedTensor(name="feed_forward.input", width=width, recomputable=True)
        return Component(
            name="feed_forward",
            kind="dense",
            weights=_dense_weights(shape, shape.intermediate_size),
            saved=(read, *_inner_saved(shape, shape.intermediate_size)),
            backward_steps=(_backward_tensors(shape, shape.intermediate_size, hidden=1, narrow_hidden=1),),
            input_width=shape.hidden_size,
        )
    experts = shape.num_experts
    router = Weight(
        name="router",
        matrix_elements=shape.hidden_size * experts,
        vector_elements=experts * shape.router_bias,
    )
    weights, saved = [router, *_expert_weights(shape)], _expert_saved(shape)
    if shape.shared_size:
        weights += _dense_weights(shape, shape.shared_size, "shared_")
        saved += _inner_saved(shape, shape.shared_size)
    if shape.shared_gate:
        weights.append(Weight(name="shared_gate", matrix_elements=shape.hidden_size))
        saved += (
            SavedTensor(name="shared.output", width=shape.hidden_size),
            SavedTensor(name="shared.gate", width=1),
        )
    return Component(
        name="feed_forward",
        kind="experts",
        weights=tuple(weights),
        saved=saved,
        backward_steps=_expert_steps(shape),
        num_experts=experts,
        experts_per_token=shape.experts_per_token,
        routing_groups=shape.routing_groups,
        groups_per_token=shape.groups_per_token,
        shared_experts=shape.num_shared,
    )


def norms_component(shape: LayerShape) -> Component:
    """Return the norms of a layer over the hidden size, as one component."""
    hidden = shape.attention.hidden_size
    size = norm_parameters(shape.norm, hidden)
    weights = (Weight(name=f"norm_{index}", vector_elements=size) for index in range(shape.num_norms))
    saved = (
        tuple(
            one
            for one in norm_saved_tensors(f"norm_{index}", shape.norm, hidden)
            if not (shape.shared_input and index and one.name.endswith(".input"))
        )
        for index in range(shape.num_norms)
    )
    gradients = (SavedTensor(name="norm.gradients", width=4.5 * hidden, element_bytes=4),)
    return Component(
        name="norms", kind="norm", weights=tuple(weights), saved=sum(saved, ()), backward_steps=(gradients,)
    )


def _dense_weights(shape: FeedForwardShape, width: int, prefix: str = "") -> tuple[Weight, ...]:
    size = shape.hidden_size * width
    first = (
        Weight(name=prefix + n, matrix_elements=size, vector_elements=width * shape.bias, max_pieces=width)
        for n in shape.first_products
    )
    bias = (Weight(name=f"{prefix}down_bias", vector_elements=shape.hidden_size),) if shape.bias else ()
    return (*first, Weight(name=f"{prefix}down", matrix_elements=size, max_pieces=width), *bias)


def _expert_weights(shape: FeedForwardShape) -> tuple[Weight, ...]:
    def expert(name: str, outputs: int) -> Weight:
        return Weight(
            name=name,
            matrix_elements=shape.hidden_size * shape.intermediate_size,
            vector_elements=outputs * shape.bias,
            copies=shape.num_experts,
            active_copies=shape.experts_per_token,
            max_pieces=shape.intermediate_size,
            expert=True,
        )

    return (
        *(expert(name, shape.intermediate_size) for name in shape.first_products),
        expert("down", shape.hidden_size),
    )


def _inner_saved(shape: FeedForwardShape, width: int, *, routed: bool = False) -> tuple[SavedTensor, ...]:
    """Return the tensors saved between the first products and the last, including its input."""
    kept = shape.activation_tensors
    first = SavedTensor(name="first.output", width=len(shape.first_products) * width, routed=routed, cut="tp")
    between = SavedTensor(name="activation", width=kept * width, routed=routed, cut="tp", recomputable=True)
    product = SavedTensor(name="down.input", width=width, routed=routed, cut="tp", recomputable=True)
    if not shape.keeps_first:
        return (product,)
    return (first, between, product) if kept else (first, product)


def _backward_tensors(
    shape: FeedForwardShape, width: int, *, hidden: int, narrow_hidden: int, routed: bool = False
) -> tuple[SavedTensor, ...]:
    """Return the gradients of a block: two of the intermediate size, and multiples of the hidden size."""
    return (
        SavedTensor(name="inner.gradients", width=2 * width, routed=routed, cut="tp"),
        SavedTensor(name="hidden.gradients", width=hidden * shape.hidden_size),
        SavedTensor(name="hidden.narrow", width=narrow_hidden * shape.hidden_size, below_fp32=True),
    )


def _expert_steps(shape: FeedForwardShape) -> tuple[tuple[SavedTensor, ...], ...]:
    """Return the two steps that may be the peak: inside the experts, and the sum of their outputs."""

    def routed(name: str, times: int, narrow: bool = False) -> SavedTensor:
        return SavedTensor(name=name, width=times * shape.hidden_size, routed=True, cut="none", below_fp32=narrow)

    inside = _backward_tensors(shape, shape.intermediate_size, hidden=1, narrow_hidden=1, routed=True)
    return (
        (*inside, routed("down.output", -1), routed("down.gradient", 2, narrow=True)),
        (routed("combine.gradients", 3), SavedTensor(name="hidden.gradients", width=2 * shape.hidden_size)),
    )


def _expert_saved(shape: FeedForwardShape) -> tuple[SavedTensor, ...]:
    return (
        SavedTensor(name="feed_forward.input", width=shape.hidden_size),
        SavedTensor(name="router.probabilities", width=shape.num_experts, element_bytes=4),
        SavedTensor(name="routing", width=1, element_bytes=_INDEX_BYTES, routed=True, cut="none"),
        SavedTensor(name="dispatch", width=shape.hidden_size, routed=True, cut="none"),
        *_inner_saved(shape, shape.intermediate_size, routed=True),
        SavedTensor(name="down.output", width=shape.hidden_size, routed=True, cut="none"),
    )
