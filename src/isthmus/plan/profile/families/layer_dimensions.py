"""`layer_shape`: the dimensions of a decoder layer, from a `config.json` by the rules of its family."""

from __future__ import annotations

from typing import Any

from isthmus.core.errors import ModelError
from isthmus.plan.profile.families.check_config import check_config, is_integer_from
from isthmus.plan.profile.families.model_families import Config, ModelFamily, no_window
from isthmus.plan.profile.layer_shapes import (
    AttentionKernel,
    AttentionShape,
    FeedForwardShape,
    LatentShape,
    LayerShape,
    NormKind,
)

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of the number of experts in different releases of transformers."""

_EXTRA_TENSORS = {"gelu_new": 3}
"""Tensors that an activation of several operations saves besides its input and output."""


def layer_shape(family: ModelFamily, config: Config, index: int, kernel: AttentionKernel | None = None) -> LayerShape:
    """Return the dimensions of decoder layer `index`; `kernel` overrides the family's attention kernel.

    `config` is a `config.json` completed by `config_with_defaults`.
    """
    return LayerShape(
        attention=_attention_shape(family, config, index, kernel or family.kernel),
        feed_forward=_feed_forward_shape(family, config, index),
        num_norms=_num_norms(family, config),
        norm=family.norm,
        shared_input=_config_flag(config, family.parallel_residual),
    )


def config_with_defaults(family: ModelFamily, config: Config) -> dict[str, Any]:
    """Return `config` with the defaults of the family's class; raise `ModelError` for invalid fields."""
    stated = {key: value for key, value in config.items() if value is not None}
    counts = [stated[key] for key in _EXPERT_COUNTS if key in stated]
    whole = {**family.defaults, **stated, **({"num_experts": counts[0]} if counts else {})}
    check_config(whole)
    for key, value in family.unsupported.items():
        if whole.get(key) == value:
            raise ModelError(f"config.json: {key} is {value!r}", hint="no profile is known for such a variant")
    narrow = whole.get("word_embed_proj_dim")
    if narrow is not None and narrow != whole.get("hidden_size"):
        raise ModelError(f"config.json: word_embed_proj_dim is {narrow!r:.80}", hint="it must be hidden_size")
    return whole


def position_width(family: ModelFamily, config: Config) -> int:
    """Return the elements that the rotary embedding saves per position of a sequence."""
    if not _config_flag(config, family.rotary):
        return 0
    head_dim = config.get("head_dim") or config_size(config, "hidden_size") // config_size(
        config, "num_attention_heads"
    )
    rotary = config.get("qk_rope_head_dim") or round(head_dim * config.get("partial_rotary_factor", 1.0))
    return family.rotary_tensors * int(rotary)


def _attention_shape(family: ModelFamily, config: Config, index: int, kernel: AttentionKernel) -> AttentionShape:
    hidden, heads = config_size(config, "hidden_size"), config_size(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    value_dim, latent = head_dim, None
    if family.latent:
        latent = LatentShape(
            query_rank=config.get("q_lora_rank"),
            kv_rank=config_size(config, "kv_lora_rank"),
            rope_dim=config_size(config, "qk_rope_head_dim"),
            nope_dim=config_size(config, "qk_nope_head_dim"),
        )
        head_dim, value_dim = latent.nope_dim + latent.rope_dim, config_size(config, "v_head_dim")
    return AttentionShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=_window(family, config, index),
        qkv_bias=_config_flag(config, family.qkv_bias),
        o_bias=_config_flag(config, family.o_bias),
        qk_norm=_qk_norm(family, config),
        sinks=family.sinks,
        fused_qkv=family.fused_qkv,
        rotary=_config_flag(config, family.rotary),
        partial_rotary=float(config.get("partial_rotary_factor", 1.0)) != 1.0,
        capped=config.get("attn_logit_softcapping") is not None,
        kernel=kernel,
        latent=latent,
    )


def _feed_forward_shape(family: ModelFamily, config: Config, index: int) -> FeedForwardShape:
    hidden = config_size(config, "hidden_size")
    tensors = family.activation_tensors + _EXTRA_TENSORS.get(str(config.get("hidden_act")), 0)
    if not family.has_experts(config, index):
        return FeedForwardShape(
            hidden_size=hidden,
            intermediate_size=config_size(config, "intermediate_size"),
            gated=family.gated,
            bias=_config_flag(config, family.mlp_bias),
            activation_tensors=tensors,
            keeps_first=str(config.get("hidden_act")) != "relu",
            parallel=_config_flag(config, family.parallel),
        )
    width, (groups, chosen) = config_size(config, family.expert_width), _routing_groups(config)
    num_shared = int(config.get("n_shared_experts") or 0)
    shared = config.get("shared_expert_intermediate_size") or width * num_shared
    return FeedForwardShape(
        hidden_size=hidden,
        intermediate_size=width,
        bias=family.expert_bias,
        activation_tensors=tensors,
        num_experts=config_size(config, "num_experts"),
        experts_per_token=_experts_per_token(config),
        routing_groups=groups,
        groups_per_token=chosen,
        shared_size=shared,
        num_shared=num_shared or int(shared > 0),
        shared_gate=bool(config.get("shared_gate")),
        router_bias=family.router_bias,
    )


def _experts_per_token(config: Config) -> int:
    chosen, experts = config_size(config, "num_experts_per_tok"), config_size(config, "num_experts")
    if chosen > experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {chosen}", hint=f"it must be at most num_experts, {experts}"
        )
    return chosen


def _routing_groups(config: Config) -> tuple[int, int]:
    """Return the groups of experts and how many of them a token chooses from, if the router limits it (DeepSeek)."""
    groups, experts = int(config.get("n_group") or 1), config_size(config, "num_experts")
    chosen = int(config.get("topk_group") or groups)
    if experts % groups:
        raise ModelError(f"config.json: n_group is {groups}", hint=f"it must divide the number of experts, {experts}")
    least = -(-_experts_per_token(config) * groups // experts)
    if not least <= chosen <= groups:
        raise ModelError(
            f"config.json: topk_group is {chosen}",
            hint=f"it must be from {least}, which hold the experts of a token, to n_group, {groups}",
        )
    return groups, chosen


def _num_norms(family: ModelFamily, config: Config) -> int:
    count = family.num_norms
    return config_size(config, count) if isinstance(count, str) else count


def _window(family: ModelFamily, config: Config, index: int) -> int | None:
    kinds = config.get("layer_types")
    if kinds and family.window is not no_window:
        return config.get("sliding_window") if kinds[index] == "sliding_attention" else None
    return family.window(config, index)


def _qk_norm(family: ModelFamily, config: Config) -> NormKind | None:
    if family.qk_norm == "qk_layernorm":
        return "layer" if config.get("qk_layernorm") else None
    return family.qk_norm  # type: ignore[return-value]


def _config_flag(config: Config, rule: str | bool) -> bool:
    return bool(config.get(rule, False)) if isinstance(rule, str) else rule


def config_size(config: Config, key: str) -> int:
    """Return the dimension `key`; raise `ModelError` unless it is an integer of at least 1."""
    value = config.get(key)
    if not is_integer_from(value, 1):
        raise ModelError(f"config.json: {key} is {value!r:.80}", hint="it must be an integer of at least 1")
    return value
