"""What tells one model family from another: where its `config.json` keeps each dimension, and what it leaves
unsaid.

A family is a row of data (`FAMILIES`); where a rule needs code (which layers look through a window, which
have experts) it is one of the small functions below. Defaults are those of the families' published classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.core.errors import ModelError
from isthmus.plan.layers import AttentionShape, FeedForwardShape, Latent, LayerShape, NormKind

Config = Mapping[str, Any]


def _no_window(config: Config, index: int) -> int | None:  # noqa: ARG001
    return None


def _every_layer(config: Config, index: int) -> int | None:  # noqa: ARG001
    return config.get("sliding_window")


def _from_layer(config: Config, index: int) -> int | None:
    """Qwen2 and Qwen3: layers from `max_window_layers` on, and only if `use_sliding_window`."""
    if not config.get("use_sliding_window") or index < config.get("max_window_layers", 28):
        return None
    return config.get("sliding_window")


def _where_used(config: Config, index: int) -> int | None:  # noqa: ARG001
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _all_but_each(period: int) -> Callable[[Config, int], int | None]:
    """Every `period`-th layer sees everything, the others a window (Gemma 2, Gemma 3, GPT-OSS)."""

    def window(config: Config, index: int) -> int | None:
        each = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or period
        return config.get("sliding_window") if (index + 1) % each else None

    return window


def _never(config: Config, index: int) -> bool:  # noqa: ARG001
    return False


def _always(config: Config, index: int) -> bool:  # noqa: ARG001
    return True


def _by_step(config: Config, index: int) -> bool:
    """Qwen MoE: every `decoder_sparse_step`-th layer, but not those of `mlp_only_layers`."""
    step = config.get("decoder_sparse_step", 1)
    return index not in (config.get("mlp_only_layers") or ()) and step > 0 and (index + 1) % step == 0


def _after_dense(config: Config, index: int) -> bool:
    """DeepSeek: all layers after the first `first_k_dense_replace`."""
    return index >= int(config.get("first_k_dense_replace", 0))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table: switches, names of keys, and defaults of what a `config.json` may leave out."""

    defaults: Config = field(default_factory=dict)
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: NormKind | str | None = None
    norm: NormKind = "rms"
    num_norms: int = 2
    gated: bool = True
    head_bias: bool = False
    sinks: bool = False
    latent: bool = False
    window: Callable[[Config, int], int | None] = _no_window
    sparse: Callable[[Config, int], bool] = _never
    experts: str = "num_experts"
    expert_width: str = "moe_intermediate_size"
    router_bias: bool = False
    expert_bias: bool = False


_LLAMA = Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN3 = {"head_dim": 128}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_DEEPSEEK = Family(
    latent=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    sparse=_after_dense,
    experts="n_routed_experts",
    defaults={"first_k_dense_replace": 0, "num_experts_per_tok": 8},
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Family(
        window=_every_layer, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=_from_layer),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="rms", window=_from_layer, defaults=_QWEN3
    ),
    "GemmaForCausalLM": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", norm="rms_fp32", defaults=_GEMMA
    ),
    "Gemma2ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm="rms_fp32",
        num_norms=4,
        window=_all_but_each(2),
        defaults=_GEMMA | {"sliding_window": 4096, "num_key_value_heads": 4},
    ),
    "Gemma3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm="rms_fp32",
        num_norms=4,
        qk_norm="rms_fp32",
        window=_all_but_each(6),
        defaults=_GEMMA | {"sliding_window": 4096, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "PhiForCausalLM": Family(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="qk_layernorm",
        norm="layer",
        num_norms=1,
        gated=False,
        head_bias=True,
    ),
    "Phi3ForCausalLM": Family(window=_every_layer),
    "MixtralForCausalLM": Family(
        window=_every_layer,
        sparse=_always,
        experts="num_local_experts",
        expert_width="intermediate_size",
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias",
        window=_from_layer,
        sparse=_by_step,
        defaults={"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "shared_gate": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="rms",
        window=_where_used,
        sparse=_by_step,
        defaults={"num_experts": 128, "num_experts_per_tok": 8},
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "GptOssForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm="rms_fp32",
        sinks=True,
        window=_all_but_each(2),
        sparse=_always,
        experts="num_local_experts",
        expert_width="intermediate_size",
        router_bias=True,
        expert_bias=True,
        defaults={"attention_bias": True, "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4},
    ),
}
FAMILIES["Gemma3ForConditionalGeneration"] = FAMILIES["Gemma3ForCausalLM"]


def family_of(architecture: str) -> Family:
    """Return the family of a Hugging Face class name; raise `ModelError` for one that is not known."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"no profile for the architecture '{architecture}'",
            hint="known are " + ", ".join(sorted(FAMILIES)),
        )
    return FAMILIES[architecture]


def layer_shape(family: Family, config: Config, index: int) -> LayerShape:
    """Return the dimensions of decoder layer `index`. `config` is a `config.json` with the family's defaults
    in.
    """
    return LayerShape(
        attention=_attention_shape(family, config, index),
        feed_forward=_feed_forward_shape(family, config, index),
        num_norms=family.num_norms,
        norm=family.norm,
    )


def with_defaults(family: Family, config: Config) -> dict[str, Any]:
    """Return `config` with what the family's class would assume where it says nothing."""
    stated = {key: value for key, value in config.items() if value is not None}
    return {**family.defaults, **stated}


def _attention_shape(family: Family, config: Config, index: int) -> AttentionShape:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    value_dim, latent = head_dim, None
    if family.latent:
        latent = Latent(
            query_rank=config.get("q_lora_rank"),
            kv_rank=_size(config, "kv_lora_rank"),
            rope_dim=_size(config, "qk_rope_head_dim"),
            nope_dim=_size(config, "qk_nope_head_dim"),
        )
        head_dim, value_dim = latent.nope_dim + latent.rope_dim, _size(config, "v_head_dim")
    return AttentionShape(
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        value_dim=value_dim,
        window=_window(family, config, index),
        qkv_bias=_switch(config, family.qkv_bias),
        o_bias=_switch(config, family.o_bias),
        qk_norm=_qk_norm(family, config),
        sinks=family.sinks,
        latent=latent,
    )


def _feed_forward_shape(family: Family, config: Config, index: int) -> FeedForwardShape:
    hidden = _size(config, "hidden_size")
    if not family.sparse(config, index):
        return FeedForwardShape(
            hidden=hidden,
            intermediate=_size(config, "intermediate_size"),
            gated=family.gated,
            bias=_switch(config, family.mlp_bias),
        )
    width = _size(config, family.expert_width)
    num_shared = int(config.get("n_shared_experts") or 0)
    shared = config.get("shared_expert_intermediate_size") or width * num_shared
    return FeedForwardShape(
        hidden=hidden,
        intermediate=width,
        bias=family.expert_bias,
        num_experts=_size(config, "num_experts" if family.experts not in config else family.experts),
        experts_per_token=_size(config, "num_experts_per_tok"),
        shared=shared,
        num_shared=num_shared or int(shared > 0),
        shared_gate=bool(config.get("shared_gate")),
        router_bias=family.router_bias,
    )


def _window(family: Family, config: Config, index: int) -> int | None:
    kinds = config.get("layer_types")
    if kinds and family.window is not _no_window:
        return config.get("sliding_window") if kinds[index] == "sliding_attention" else None
    return family.window(config, index)


def _qk_norm(family: Family, config: Config) -> NormKind | None:
    if family.qk_norm == "qk_layernorm":
        return "layer" if config.get("qk_layernorm") else None
    return family.qk_norm  # type: ignore[return-value]


def _switch(config: Config, rule: str | bool) -> bool:
    return bool(config.get(rule, False)) if isinstance(rule, str) else rule


def _size(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}", hint="a whole number of at least 1 is needed")
    return value
