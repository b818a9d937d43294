"""`FAMILIES`: per model family, the keys of its dimensions in `config.json` and their defaults.

Rules that need code (which layers have a sliding window, which have experts) are the small functions below.
Defaults are those of the families' published classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.core.errors import ModelError
from isthmus.plan.profile.attention import Kernel
from isthmus.plan.profile.norms import NormKind

Config = Mapping[str, Any]


def no_window(config: Config, index: int) -> int | None:  # noqa: ARG001
    """Return None: every layer has full attention."""
    return None


def _every_layer(config: Config, index: int) -> int | None:  # noqa: ARG001
    return config.get("sliding_window")


def _from_layer(config: Config, index: int) -> int | None:
    """Return the window of layers from `max_window_layers`, if `use_sliding_window` (Qwen2, Qwen3)."""
    if not config.get("use_sliding_window") or index < config.get("max_window_layers", 28):
        return None
    return config.get("sliding_window")


def _where_used(config: Config, index: int) -> int | None:  # noqa: ARG001
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _all_but_each(period: int) -> Callable[[Config, int], int | None]:
    """Return a rule: every `period`-th layer has full attention, others a window (Gemma 2 and 3, GPT-OSS)."""

    def window(config: Config, index: int) -> int | None:
        each = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or period
        return config.get("sliding_window") if (index + 1) % each else None

    return window


def _never(config: Config, index: int) -> bool:  # noqa: ARG001
    return False


def _always(config: Config, index: int) -> bool:  # noqa: ARG001
    return True


def _by_step(config: Config, index: int) -> bool:
    """Return True for every `decoder_sparse_step`-th layer, except `mlp_only_layers` (Qwen MoE)."""
    step = config.get("decoder_sparse_step", 1)
    return index not in (config.get("mlp_only_layers") or ()) and step > 0 and (index + 1) % step == 0


def _after_dense(config: Config, index: int) -> bool:
    """Return True for all layers after the first `first_k_dense_replace` (DeepSeek)."""
    return index >= int(config.get("first_k_dense_replace", 0))


@dataclass(frozen=True, kw_only=True)
class Family:
    """The rules of a model family: switches, keys, and defaults of optional fields of its `config.json`.

    A switch given as text is the key that holds it. `kernel` is the default of transformers. `rotary` is the
    number of tensors of the rotary dimension saved per position: a cosine and a sine, or half of each.
    """

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
    window: Callable[[Config, int], int | None] = no_window
    sparse: Callable[[Config, int], bool] = _never
    expert_width: str = "moe_intermediate_size"
    router_bias: bool = False
    expert_bias: bool = False
    kernel: Kernel = "fused"
    fused_qkv: bool = False
    parallel: bool = False
    activation_tensors: int = 1
    rotary: int = 2


_LLAMA = Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN3 = {"head_dim": 128}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_DEEPSEEK = Family(
    latent=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    sparse=_after_dense,
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
        kernel="eager",
        window=_all_but_each(2),
        defaults=_GEMMA
        | {
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm="rms_fp32",
        num_norms=4,
        qk_norm="rms_fp32",
        rotary=4,
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
        parallel=True,
        activation_tensors=0,
        head_bias=True,
        defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    ),
    "Phi3ForCausalLM": Family(window=_every_layer, fused_qkv=True),
    "MixtralForCausalLM": Family(
        window=_every_layer,
        sparse=_always,
        expert_width="intermediate_size",
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
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
        kernel="eager",
        activation_tensors=4,
        rotary=1,
        window=_all_but_each(2),
        sparse=_always,
        expert_width="intermediate_size",
        router_bias=True,
        expert_bias=True,
        defaults={"attention_bias": True, "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4},
    ),
}
FAMILIES["Gemma3ForConditionalGeneration"] = FAMILIES["Gemma3ForCausalLM"]


def family_of(architecture: str) -> Family:
    """Return the family of a Hugging Face class name; raise `ModelError` for an unknown one."""
    if architecture not in FAMILIES:
        raise ModelError(
            f"no profile for the architecture '{architecture}'",
            hint="supported: " + ", ".join(sorted(FAMILIES)),
        )
    return FAMILIES[architecture]
