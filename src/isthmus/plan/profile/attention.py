"""Attention blocks: their weights and the tensors that autograd saves, for each kind of kernel.

The saved tensors are those of the model classes in transformers, as reported by
`torch.autograd.graph.saved_tensors_hooks` (`tests/plan/test_memory_torch.py`). Kernel `fused` is
scaled_dot_product_attention; `eager` keeps the scores in memory.
"""

from __future__ import annotations

from isthmus.plan.profile.component import AttentionCore, Component, SavedTensor, Weight
from isthmus.plan.profile.layer_shapes import AttentionShape, LatentShape
from isthmus.plan.profile.norms import norm_parameters, norm_saved_tensors


def attention_component(shape: AttentionShape) -> Component:
    """Return the attention block: projections, optional norms of query and key, and the core."""
    weights, saved, kv_width = _latent_attention(shape, shape.latent) if shape.latent else _grouped_attention(shape)
    if shape.o_bias:
        weights.append(Weight(name="o_bias", vector_elements=shape.hidden_size))
    if shape.sinks:
        weights.append(Weight(name="sinks", vector_elements=shape.num_heads, max_pieces=shape.num_heads))
    return Component(
        name="attention",
        kind="attention",
        weights=tuple(weights),
        saved=(SavedTensor(name="projection.input", width=shape.hidden_size, recomputable=True), *saved),
        backward_steps=(_backward_tensors(shape),),
        core=AttentionCore(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            key_dim=shape.head_dim,
            value_dim=shape.value_dim,
            window=shape.window,
        ),
        kv_width=kv_width,
    )


def _grouped_attention(shape: AttentionShape) -> tuple[list[Weight], list[SavedTensor], int]:
    """Return weights, saved tensors and cache width of multi-head or grouped-query attention."""
    hidden, heads, kv_heads = shape.hidden_size, shape.num_heads, shape.num_kv_heads
    query, key, value = shape.query_width, kv_heads * shape.head_dim, kv_heads * shape.value_dim
    weights = [
        Weight(name="q", matrix_elements=hidden * query, vector_elements=query * shape.qkv_bias, max_pieces=heads),
        Weight(name="k", matrix_elements=hidden * key, vector_elements=key * shape.qkv_bias, max_pieces=kv_heads),
        Weight(
            name="v",
            matrix_elements=hidden * value,
            vector_elements=value * shape.qkv_bias,
            max_pieces=kv_heads,
        ),
        Weight(name="o", matrix_elements=shape.result_width * hidden, max_pieces=heads),
    ]
    value_held = query + key + value if shape.fused_qkv and shape.rotary else value
    saved = _core_saved(shape, kv_heads=kv_heads, value_held=value_held)
    if shape.qk_norm:
        weights.append(Weight(name="qk_norm", vector_elements=2 * norm_parameters(shape.qk_norm, shape.head_dim)))
        saved += norm_saved_tensors("q_norm", shape.qk_norm, query, cut="tp", groups=heads)
        saved += norm_saved_tensors("k_norm", shape.qk_norm, key, cut="tp", groups=kv_heads)
    return weights, saved, key + value


def _latent_attention(shape: AttentionShape, latent: LatentShape) -> tuple[list[Weight], list[SavedTensor], int]:
    """Return weights, saved tensors and cache width of latent attention, which caches the latent."""
    hidden, heads, query = shape.hidden_size, shape.num_heads, shape.query_width
    up, down = heads * (latent.nope_dim + shape.value_dim), latent.kv_rank + latent.rope_dim
    weights = [
        Weight(name="kv_a", matrix_elements=hidden * down, vector_elements=down * shape.qkv_bias),
        Weight(name="kv_a_norm", vector_elements=latent.kv_rank),
        Weight(name="kv_b", matrix_elements=latent.kv_rank * up, max_pieces=heads),
        Weight(name="o", matrix_elements=shape.result_width * hidden, max_pieces=heads),
    ]
    saved = [
        *_core_saved(shape, kv_heads=heads, value_held=up),
        *norm_saved_tensors("kv_a_norm", "rms", latent.kv_rank),
        SavedTensor(name="kv_b.input", width=latent.kv_rank, recomputable=True),
    ]
    if latent.query_rank is None:
        return [Weight(name="q", matrix_elements=hidden * query, max_pieces=heads), *weights], saved, down
    rank = latent.query_rank
    weights = [
        Weight(name="q_a", matrix_elements=hidden * rank, vector_elements=rank * shape.qkv_bias),
        Weight(name="q_a_norm", vector_elements=rank),
        Weight(name="q_b", matrix_elements=rank * query, max_pieces=heads),
        *weights,
    ]
    saved += [
        *norm_saved_tensors("q_a_norm", "rms", rank),
        SavedTensor(name="q_b.input", width=rank, recomputable=True),
    ]
    return weights, saved, down


def _backward_tensors(shape: AttentionShape) -> tuple[SavedTensor, ...]:
    """Return the live tensors of the core's backward: gradients of its inputs and result, or of scores."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    hidden = SavedTensor(name="hidden.gradients", width=2 * shape.hidden_size)
    if shape.kernel == "eager":
        return (
            hidden,
            SavedTensor(name="scores.gradients", width=2 * heads, per_key=True, element_bytes=4, cut="tp"),
        )
    return (
        hidden,
        SavedTensor(name="query.gradients", width=shape.query_width + shape.result_width, cut="tp", max_pieces=heads),
        SavedTensor(
            name="key.gradients",
            width=kv_heads * (shape.head_dim + shape.value_dim),
            cut="tp",
            max_pieces=kv_heads,
        ),
    )


def _core_saved(shape: AttentionShape, *, kv_heads: int, value_held: int) -> list[SavedTensor]:
    """Return the tensors that the core saves; the value is a view of a tensor of width `value_held`."""
    heads = shape.num_heads
    query = SavedTensor(name="q", width=shape.query_width, cut="tp", max_pieces=heads)
    result = SavedTensor(name="core.output", width=shape.result_width, cut="tp", max_pieces=heads)
    if shape.kernel == "eager":
        return [query, *_eager_saved(shape), result]
    saved = [
        query,
        SavedTensor(name="k", width=kv_heads * shape.head_dim, cut="tp", max_pieces=kv_heads),
        SavedTensor(name="v", width=value_held, cut="tp", max_pieces=kv_heads),
        SavedTensor(name="core.logsumexp", width=heads, element_bytes=4, cut="tp", max_pieces=heads),
        result,
    ]
    if (shape.fused_qkv and shape.rotary) or shape.partial_rotary:  # the result is not contiguous, and is copied
        saved.append(SavedTensor(name="o.input", width=shape.result_width, cut="tp", max_pieces=heads))
    if shape.window is not None:  # a window needs a mask, with which the kernel does not support grouped keys
        copied_heads = heads - kv_heads if kv_heads > 1 else 0  # a single head is repeated without a copy
        repeated = copied_heads * (shape.head_dim + shape.value_dim)
        saved += [
            SavedTensor(name="window.mask", width=1, per_key=True, longer_than=shape.window, cut="none"),
            SavedTensor(name="window.repeated", width=repeated, longer_than=shape.window, cut="tp", max_pieces=heads),
        ]
    return saved


def _eager_saved(shape: AttentionShape) -> list[SavedTensor]:
    """Return the tensors that eager attention saves: repeated keys and values, and scores."""
    heads = shape.num_heads

    def rows(name: str, bytes_each: int | None, narrow: bool = False) -> SavedTensor:
        return SavedTensor(
            name=name,
            width=heads,
            per_key=True,
            element_bytes=bytes_each,
            cut="tp",
            below_fp32=narrow,
            recomputable=True,
        )

    saved = [
        SavedTensor(name="k", width=heads * shape.head_dim, cut="tp", max_pieces=heads),
        SavedTensor(name="v", width=shape.result_width, cut="tp", max_pieces=heads),
    ]
    if shape.capped:
        saved.append(rows("scores.capped", None))
    if shape.sinks:
        largest = SavedTensor(
            name="scores.largest", width=heads, element_bytes=8, cut="tp", max_pieces=heads, recomputable=True
        )
        return [*saved, rows("scores.softmax", None), largest]
    return [*saved, rows("scores.softmax", 4), rows("scores.probabilities", None, narrow=True)]
