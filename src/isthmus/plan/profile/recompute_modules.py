"""`module_profile`: a model's profile in which selective recomputation repeats chosen modules of each layer.

Source of the modules and of what each drops: NVIDIA/Megatron-LM, core/transformer/transformer_config.py,
`recompute_modules`. `layernorm`, `moe_act` and `mla_up_proj` drop outputs, the others all between input and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

from isthmus.core.plan_parts.recompute_module import RecomputeModule
from isthmus.plan.profile.component import Component, SavedTensor
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile, RepeatedWork

_INNER = ("first.output", "activation", "down.input")
_LATENT = ("q_b", "kv_b")
_MATRICES = ("gate", "up", "down")


@lru_cache(maxsize=256)
def module_profile(profile: ModelProfile, modules: tuple[RecomputeModule, ...]) -> ModelProfile:
    """Return `profile`, stacked or not, with `modules` instead of the stack's own policy; an empty list keeps this."""
    if not modules:
        return profile
    layers = {id(layer): _layer(layer, modules) for layer in profile.layers}
    return replace(profile, layers=tuple(layers[id(layer)] for layer in profile.layers))


def _layer(layer: LayerProfile, modules: Sequence[RecomputeModule]) -> LayerProfile:
    parts = {name: _component(getattr(layer, name), modules) for name in ("attention", "feed_forward", "norms")}
    before = sum(_width(one) for name in parts for one in getattr(layer, name).saved if not one.per_key)
    dropped = sum(_width(one) for part in parts.values() for one in part.saved if one.recomputable and not one.per_key)
    dense = layer.feed_forward.kind == "dense"
    names = _repeated_weights(modules, dense=dense)
    return replace(
        layer,
        attention=parts["attention"],
        feed_forward=parts["feed_forward"],
        norms=parts["norms"],
        repeated_weights=names,
        repeats_attention="core_attn" in modules,
        repeated=RepeatedWork(
            traffic_share=dropped / before,
            num_tp_exchanges=1.0 if "mlp" in modules and dense else 0.0,
            expert_exchanges="moe" in modules and not dense,
        ),
    )


def _width(tensor: SavedTensor) -> float:
    return tensor.width * (tensor.element_bytes or 2)


def _repeated_weights(modules: Sequence[RecomputeModule], *, dense: bool) -> tuple[str, ...]:
    names: tuple[str, ...] = ()
    if ("mlp" in modules and dense) or ("moe" in modules and not dense):
        names += (*_MATRICES, *(() if dense else ("router", "shared_gate", *(f"shared_{one}" for one in _MATRICES))))
    elif "shared_experts" in modules:
        names += tuple(f"shared_{one}" for one in _MATRICES)
    return (*names, *(_LATENT if "mla_up_proj" in modules else ()))


def _component(part: Component, modules: Sequence[RecomputeModule]) -> Component:
    saved = (replace(one, recomputable=_is_dropped(one, part, modules)) for one in part.saved if not one.only_selective)
    return replace(part, saved=tuple(saved))


def _is_dropped(tensor: SavedTensor, part: Component, modules: Sequence[RecomputeModule]) -> bool:
    name, experts = tensor.name, part.kind == "experts"
    latent = any(weight.name == "kv_b" for weight in part.weights)
    return (
        ("core_attn" in modules and (fnmatchcase(name, "scores.*") or name == "core.logsumexp"))
        or ("layernorm" in modules and _is_norm_output(name, part))
        or ("mla_up_proj" in modules and latent and name in ("q", "k", "v"))
        or ("mlp" in modules and part.kind == "dense" and name in _INNER)
        or ("moe" in modules and experts and name != "feed_forward.input")
        or ("moe_act" in modules and experts and tensor.routed and name in ("activation", "down.input"))
        or ("shared_experts" in modules and experts and not tensor.routed and name in _INNER)
    )


def _is_norm_output(name: str, part: Component) -> bool:
    """Return whether a tensor is the output of a norm before attention or feed-forward, an input of products there."""
    own = part.kind == "norm" and fnmatchcase(name, "*norm*.scaled")
    return own or name == "projection.input" or (part.kind == "dense" and name == "feed_forward.input")
