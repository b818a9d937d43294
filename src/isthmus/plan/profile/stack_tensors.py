"""`stacked_profile`: a model's profile with the tensors that a stack keeps instead of those of the model classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from isthmus.core.chip import NARROW_PRECISIONS, Precision
from isthmus.core.stack import AddedTensor, Stack, TensorRule, find_stack
from isthmus.plan.profile.component import Component, SavedTensor, input_width
from isthmus.plan.profile.model_profile import LayerProfile, ModelProfile

DEFAULT_STACK = "isthmus"
"""The stack of this project's runtime: exactly the tensors of the model classes."""


def stacked_profile(profile: ModelProfile, choice: str | Stack, precision: Precision | None) -> ModelProfile:
    """Return `profile` as the chosen stack trains it with products of `precision`; a stacked profile stays as it is.

    Raises `InputError` for an unknown name.
    """
    stack = find_stack(choice)
    if profile.stack is stack or profile.stack == stack:
        return profile
    return _stacked(profile, stack, precision in NARROW_PRECISIONS)


@lru_cache(maxsize=256)
def _stacked(profile: ModelProfile, stack: Stack, eight_bit: bool) -> ModelProfile:
    known = {id(layer): layer for layer in profile.layers}
    layers = {key: _layer(layer, stack, eight_bit) for key, layer in known.items()}
    return replace(
        profile,
        embedding=_component(profile.embedding, stack, eight_bit),
        layers=tuple(layers[id(layer)] for layer in profile.layers),
        final_norm=_component(profile.final_norm, stack, eight_bit),
        head=_component(profile.head, stack, eight_bit=False),
        stack=stack,
        eight_bit=eight_bit,
    )


def _layer(layer: LayerProfile, stack: Stack, eight_bit: bool) -> LayerProfile:
    return replace(
        layer,
        attention=_component(layer.attention, stack, eight_bit),
        feed_forward=_component(layer.feed_forward, stack, eight_bit),
        norms=_component(layer.norms, stack, eight_bit),
        repeated_weights=stack.selective.weights,
        repeats_attention=stack.selective.attention,
        traffic_ratio=stack.traffic_ratio,
        attention_kernel=stack.attention_kernel,
    )


def _component(part: Component, stack: Stack, eight_bit: bool) -> Component:
    kept = [one for tensor in part.saved for one in _apply_rules(tensor, stack.tensors, eight_bit)]
    names = {tensor.name: tensor for tensor in part.saved}
    kept += [
        _added(names[one.like], one) for one in stack.added if one.like in names and (eight_bit or one.when != "fp8")
    ]
    steps = tuple(
        tuple(one for tensor in step for one in _apply_rules(tensor, stack.tensors, eight_bit))
        for step in part.backward_steps
    )
    return replace(part, saved=tuple(kept), backward_steps=steps, input_width=input_width(part))


def _apply_rules(tensor: SavedTensor, rules: Sequence[TensorRule], eight_bit: bool) -> Iterator[SavedTensor]:
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
        each = (rule.fp8_bytes or each) if eight_bit else each
    width = tensor.width * kept
    for share, recomputable in ((selective, False), (1.0 - selective, True)):
        if width * share:
            yield replace(tensor, width=width * share, element_bytes=each, recomputable=recomputable)


def _added(like: SavedTensor, added: AddedTensor) -> SavedTensor:
    return replace(
        like,
        name=added.name,
        width=like.width * added.times,
        element_bytes=added.element_bytes,
        recomputable=False,
        only_selective=added.when == "selective",
    )
