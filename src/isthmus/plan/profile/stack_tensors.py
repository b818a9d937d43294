"""`stacked_profile`: a model's profile with the tensors that a stack keeps instead of those of the model classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from isthmus.core.chip import NARROW_BYTES, Precision
from isthmus.core.stack import AddedTensor, Stack, TensorRule, find_stack
from isthmus.plan.profile.component import Component, SavedTensor, input_width
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile


def stacked_profile(profile: ModelProfile, choice: str | Stack, precision: Precision | None) -> ModelProfile:
    """Return `profile` as the chosen stack trains it with products of `precision`; a stacked profile stays as it is.

    Raises `InputError` for an unknown name.
    """
    stack = find_stack(choice)
    if profile.stack is stack or profile.stack == stack:
        return profile
    return _stacked(profile, stack, NARROW_BYTES.get(precision or "bf16", 0.0))


@lru_cache(maxsize=256)
def _stacked(profile: ModelProfile, stack: Stack, narrow_bytes: float) -> ModelProfile:
    known = {id(layer): layer for layer in profile.layers}
    layers = {key: _layer(layer, stack, narrow_bytes) for key, layer in known.items()}
    return replace(
        profile,
        embedding=_component(profile.embedding, stack, narrow_bytes),
        layers=tuple(layers[id(layer)] for layer in profile.layers),
        final_norm=_component(profile.final_norm, stack, narrow_bytes),
        head=_component(profile.head, stack, narrow_bytes=0.0),
        stack=stack,
        narrow_bytes=narrow_bytes,
    )


def _layer(layer: LayerProfile, stack: Stack, narrow_bytes: float) -> LayerProfile:
    return replace(
        layer,
        attention=_component(layer.attention, stack, narrow_bytes),
        feed_forward=_component(layer.feed_forward, stack, narrow_bytes),
        norms=_component(layer.norms, stack, narrow_bytes),
        repeated_weights=stack.selective.weights,
        repeats_attention=stack.selective.attention,
        traffic_ratio=stack.traffic_ratio,
        traffic=tuple(rule for rule in stack.traffic if narrow_bytes or rule.when != "fp8"),
        repeated_traffic_share=stack.selective.traffic_share,
        num_repeated_exchanges=stack.selective.num_tp_exchanges,
        exchanges=stack.exchanges,
        narrow_products=narrow_bytes > 0,
        attention_kernel=stack.attention_kernel,
        expert_launch_ratio=stack.expert_launch_ratio,
    )


def _component(part: Component, stack: Stack, narrow_bytes: float) -> Component:
    kept = [one for tensor in part.saved for one in _apply_rules(tensor, stack.tensors, narrow_bytes)]
    names = {tensor.name: tensor for tensor in part.saved}
    kept += [
        _added(names[one.like], one, narrow_bytes)
        for one in stack.added
        if one.like in names and (narrow_bytes or one.when != "fp8")
    ]
    steps = tuple(
        tuple(one for tensor in step for one in _apply_rules(tensor, stack.tensors, narrow_bytes))
        for step in part.backward_steps
    )
    return replace(part, saved=tuple(kept), backward_steps=steps, input_width=input_width(part))


def _apply_rules(tensor: SavedTensor, rules: Sequence[TensorRule], narrow_bytes: float) -> Iterator[SavedTensor]:
    """Yield what is kept of a tensor: nothing, itself, or a part that selective recomputation keeps and one it drops.

    Every rule that matches applies, later ones over earlier ones.
    """
    kept, selective, each = 1.0, 0.0 if tensor.recomputable else 1.0, tensor.element_bytes
    for rule in rules:
        if not fnmatchcase(tensor.name, rule.tensors):
            continue
        kept = rule.kept
        selective = selective if rule.selective is None else rule.selective
        each = rule.element_bytes or each
        each = rule.fp8_bytes * narrow_bytes if rule.fp8_bytes and narrow_bytes else each
    width = tensor.width * kept
    for share, recomputable in ((selective, False), (1.0 - selective, True)):
        if width * share:
            yield replace(tensor, width=width * share, element_bytes=each, recomputable=recomputable)


def _added(like: SavedTensor, added: AddedTensor, narrow_bytes: float) -> SavedTensor:
    narrow = narrow_bytes if added.when == "fp8" else 1.0
    return replace(
        like,
        name=added.name,
        width=like.width * added.times,
        element_bytes=added.element_bytes * narrow if added.element_bytes else None,
        recomputable=like.per_key,  # scores and their masks are made again with the attention core
        only_selective=added.when == "selective",
    )
