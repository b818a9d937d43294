"""`planned_profile`: a model's profile as a plan trains it: its stack, kernels, formats, precision and adapters."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from isthmus.core.plan import Plan, Stage
from isthmus.plan.profile.adapted_profile import adapted_profile
from isthmus.plan.profile.attention import attention_component
from isthmus.plan.profile.chosen_stack import chosen_stack
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.profile.layer_shapes import AttentionKernel
from isthmus.plan.profile.recompute_modules import module_profile
from isthmus.plan.profile.stack_tensors import stacked_profile

COMPILED_LAUNCHES = 0.5
"""Kernel launches of a compiled layer over those of a layer run operator by operator: assumed."""


def planned_profile(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """Return `profile`, which has no stack yet, as `plan` trains it. Raises `InputError` for an unknown stack."""
    if plan.kernels is not None:
        kernel = plan.kernels.attention
        if kernel is not None:
            profile = _with_kernel(profile, "eager" if kernel == "eager" else "fused")
        if plan.kernels.compiled:
            profile = _compiled(profile)
    stack = chosen_stack(plan, profile.hidden_size, profile.vocab_size)
    profile = stacked_profile(profile, stack, plan.precision)
    return profile if plan.lora is None else adapted_profile(profile, plan.lora)


def stage_profile(profile: ModelProfile, stage: Stage) -> ModelProfile:
    """Return a plan's profile as one of its stages recomputes it."""
    return module_profile(profile, stage.recompute_modules) if stage.recompute == "selective" else profile


@lru_cache(maxsize=64)
def _with_kernel(profile: ModelProfile, kernel: AttentionKernel) -> ModelProfile:
    """Return `profile` with another attention kernel in every layer whose dimensions are known."""
    layers = {id(layer): _layer_with_kernel(layer, kernel) for layer in profile.layers}
    return replace(profile, layers=tuple(layers[id(layer)] for layer in profile.layers))


def _layer_with_kernel(layer: LayerProfile, kernel: AttentionKernel) -> LayerProfile:
    shape = layer.attention_shape
    if shape is None or shape.kernel == kernel:
        return layer
    shape = replace(shape, kernel=kernel)
    return replace(layer, attention=attention_component(shape), attention_shape=shape)


@lru_cache(maxsize=64)
def _compiled(profile: ModelProfile) -> ModelProfile:
    layers = {id(layer): replace(layer, launch_ratio=COMPILED_LAUNCHES) for layer in profile.layers}
    return replace(profile, layers=tuple(layers[id(layer)] for layer in profile.layers))
