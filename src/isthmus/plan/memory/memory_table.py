"""The table of `isthmus memory`: bytes per chip and per layer, in two accountings.

`default` agrees with torch (`isthmus.plan.memory.stage_memory`). `report` reproduces the tables of
`long-sequence-rl.txt`, 2.1 and 3.1, exactly: bf16 weights; gradients called bf16 but sized as fp32; the
optimizer on the host; embedding, head, router and norms excluded from the sum of training; of the norms'
activations only those before attention and of query and key; SwiGLU counted as its input of 2 x the expert
width; worst-case routing as all tokens of the group at this chip's experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from isthmus.core.errors import InputError
from isthmus.core.model import Model
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.component import Component, Sharding, Weight
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.profile.model_profile import profile_model

Accounting = Literal["default", "report"]
BytesByGroup = dict[str, float]

_GROUPS = {
    "qkv": ("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b", "q_a_norm", "kv_a_norm", "qk_norm", "sinks"),
    "o": ("o", "o_bias"),
    "gate": ("router",),
}
_BF16, _FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class MeshDegrees:
    """Degrees of parallelism, parsed from `tp=4,pp=4,cp=4,ep=32`; `tp` implies sequence parallelism."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> MeshDegrees:
        """Parse `tp=4,pp=4`; raise `InputError` for a degree that is unknown, repeated or below 1."""
        known = [field.name for field in fields(cls)]
        degrees: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name not in known or name in degrees or not value.isdecimal() or int(value) < 1:
                raise InputError(
                    f"parallel degree '{part}'",
                    hint=f"write NAME=NUMBER, each name once; names: {', '.join(known)}",
                )
            degrees[name] = int(value)
        return cls(**degrees)


def _check_degrees(profile: ModelProfile, parallel: MeshDegrees) -> None:
    """Raise `InputError` for a degree above the experts, or one that does not divide the heads."""
    experts = max(1, *(layer.feed_forward.num_experts for layer in profile.layers))
    cores = [layer.attention.core for layer in profile.layers]
    heads = math.gcd(*(core.num_heads for core in cores if core is not None))
    if parallel.ep > experts:
        raise InputError(f"ep={parallel.ep} for {experts} experts in a layer", hint=f"nearest valid: ep={experts}")
    if heads and heads % parallel.tp:
        nearest = next(one for one in range(min(heads, parallel.tp), 0, -1) if heads % one == 0)
        raise InputError(
            f"tp={parallel.tp} does not divide the {heads} attention heads", hint=f"nearest valid: tp={nearest}"
        )


def memory_table(
    model: Model,
    parallel: MeshDegrees,
    *,
    sequence_length: int,
    inference: bool = False,
    accounting: Accounting = "default",
) -> dict[str, Any]:
    """Return the bytes on one chip of the largest stage, and of one layer's activations for one sequence.

    `per_chip` has `weights` by group with their `total`, `gradients`, `optimizer` and the sum `static`.
    `per_layer_activations` has `attention` and, with balanced and worst-case routing, `moe` (the feed-forward
    block of a dense model). Layers are divided evenly over the stages, rounded up. Inference counts weights
    only, all of them.
    """
    profile = profile_model(model)
    if parallel.pp > profile.num_layers:
        raise InputError(
            f"pp={parallel.pp} for {profile.num_layers} layers", hint="each stage needs at least one layer"
        )
    _check_degrees(profile, parallel)
    degrees = StageDegrees(tp=parallel.tp, cp=parallel.cp, ep=parallel.ep, dp=parallel.dp, sp=parallel.tp > 1)
    weights = _weight_bytes(profile, parallel, degrees, report=accounting == "report", inference=inference)
    if inference:
        gradients = optimizer = 0.0
    elif accounting == "report":
        gradients, optimizer = 2 * weights["total"], 0.0
    else:
        gradients, optimizer = weights["total"] / _BF16 * _FP32, weights["total"] / _BF16 * 3 * _FP32
    layer = max(profile.layers, key=lambda one: one.parameters)
    activations = _report_layer if accounting == "report" else _default_layer
    layers = -(-profile.num_layers // parallel.pp)
    share = layers / profile.num_layers
    per_token = profile.kv_cache_bytes_per_token(_BF16, tp=parallel.tp) * share
    return {
        "accounting": accounting,
        "layers_per_chip": layers,
        "per_chip": {
            "weights": weights,
            "gradients": gradients,
            "optimizer": optimizer,
            "static": weights["total"] + gradients + optimizer,
        },
        "per_layer_activations": activations(layer, degrees, sequence_length),
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_sequence": per_token * sequence_length,
    }


def _weight_bytes(
    profile: ModelProfile, parallel: MeshDegrees, degrees: StageDegrees, *, report: bool, inference: bool
) -> BytesByGroup:
    """Return the bf16 weight bytes by group on a chip of the first, largest stage."""
    layers = profile.layers[: -(-profile.num_layers // parallel.pp)]
    shard = degrees.sharding(layers[0])
    sums = {"embedding_lm_head": 0.0, "qkv": 0.0, "o": 0.0, "moe": 0.0, "gate": 0.0, "norm": 0.0}
    for layer in layers:
        for part in layer.components:
            for weight in part.weights:
                sums[_weight_group(part, weight)] += _BF16 * weight.on_chip(shard)
    if parallel.pp == 1:
        sums["norm"] += _BF16 * profile.final_norm.on_chip(shard)
    ends = [_BF16 * profile.embedding.on_chip(shard), _BF16 * profile.head.on_chip(shard)]
    sums["embedding_lm_head"] = sum(ends) if parallel.pp == 1 else max(ends)
    if report:  # the report never counts norms, and embedding, head and router only in inference
        uncounted = ("norm",) if inference else ("norm", "embedding_lm_head", "gate")
        sums |= dict.fromkeys(uncounted, 0.0)
        sums["qkv"] = _BF16 * sum(_qkv_elements(layer.attention, shard) for layer in layers)
    return {**sums, "total": sum(sums.values())}


def _qkv_elements(attention: Component, shard: Sharding) -> float:
    """Return the elements of the query, key and value projections on one chip, without their norms."""
    named = (w for w in attention.weights if w.name in _GROUPS["qkv"] and w.matrix_elements)
    return float(sum(weight.on_chip(shard) for weight in named))


def _weight_group(part: Component, weight: Weight) -> str:
    if part.kind == "norm":
        return "norm"
    return next((group for group, names in _GROUPS.items() if weight.name in names), "moe")


def _report_layer(layer: LayerProfile, degrees: StageDegrees, sequence_length: int) -> dict[str, Any]:
    """Return the bytes of one layer's activations as Table 3.1 counts them: every output once, in bf16."""
    whole = sequence_length / degrees.cp * _BF16
    tokens = whole / degrees.tp
    hidden = layer.hidden_size
    saved = {one.name: one for one in layer.attention.saved}

    def cut(*names: str) -> float:
        return sum(saved[name].width / min(degrees.tp, saved[name].max_pieces) for name in names if name in saved)

    attention = {
        "qkvo": whole * cut("q", "k", "v") + tokens * hidden,
        "fa": whole * cut("core.output"),
        "norm": tokens * hidden + (whole * cut("q", "k") if "q_norm.input" in saved else 0.0),
        "add": tokens * hidden,
    }
    result: dict[str, Any] = {"attention": {**attention, "total": sum(attention.values())}}
    moe: dict[str, float] = {}
    parts: dict[str, BytesByGroup] = {}
    for name, imbalance in (("balanced", 0.0), ("worst", 1.0)):
        parts[name] = _report_moe(layer, tokens, degrees.sharding(layer, imbalance).routed_per_token or 1.0)
        moe[name] = sum(parts[name].values())
    return {**result, "moe": moe, "moe_parts": parts}


def _report_moe(layer: LayerProfile, tokens: float, num_routed: float) -> BytesByGroup:
    widths = {one.name: one.width for one in layer.feed_forward.saved}
    inner = widths.get("first.output", widths["down.input"])
    return {
        "dispatch": tokens * num_routed * layer.hidden_size,
        "gmm1": tokens * num_routed * inner,
        "swiglu": tokens * num_routed * inner,  # its input, not its output
        "combine": tokens * layer.hidden_size,
        "add": tokens * layer.hidden_size,
    }


def _default_layer(layer: LayerProfile, degrees: StageDegrees, sequence_length: int) -> dict[str, Any]:
    """Return one layer's activation bytes as autograd saves them; each block has half of the norms."""
    tokens = sequence_length / degrees.cp
    shard = degrees.sharding(layer)

    def kept(part: Component, names: Iterable[str] | None, cut: Sharding) -> float:
        chosen = [one for one in part.saved if names is None or one.name in names]
        kind = Component(name=part.name, kind=part.kind, saved=tuple(chosen), experts_per_token=part.experts_per_token)
        return kind.activation_bytes(tokens, sequence_length, _BF16, shard=cut)

    norm = kept(layer.norms, None, shard) / 2
    core = [one.name for one in layer.attention.saved if one.name.startswith(("core.", "scores.", "window."))]
    inner = [one.name for one in layer.attention.saved if "norm" in one.name]
    total = kept(layer.attention, None, shard)
    fa, norms_inside = kept(layer.attention, core, shard), kept(layer.attention, inner, shard)
    attention = {"qkvo": total - fa - norms_inside, "fa": fa, "norm": norm + norms_inside, "add": 0.0}
    moe = {
        name: norm + kept(layer.feed_forward, None, degrees.sharding(layer, imbalance))
        for name, imbalance in (("balanced", 0.0), ("worst", 1.0))
    }
    return {"attention": {**attention, "total": sum(attention.values())}, "moe": moe}
