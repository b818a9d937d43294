"""`MODEL_FAMILIES`: per model family, the keys of its dimensions in `config.json` and their defaults.

Rules that need code (which layers have a sliding window, which have experts) are the small functions below.
Defaults are those of the families' published classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.core.errors import ModelError
from isthmus.plan.profile.layer_shapes import AttentionKernel, NormKind

Config = Mapping[str, Any]


def no_window(config: Config, index: int) -> int | None:  # noqa: ARG001
    """Return None: every layer has full attention."""
    return None


def _window_everywhere(config: Config, index: int) -> int | None:  # noqa: ARG001
    return config.get("sliding_window")


def _window_from_layer(config: Config, index: int) -> int | None:
    """Return the window of layers from `max_window_layers`, if `use_sliding_window` (Qwen2, Qwen3)."""
    if not config.get("use_sliding_window") or index < config.get("max_window_layers", 28):
        return None
    return config.get("sliding_window")


def _window_if_enabled(config: Config, index: int) -> int | None:  # noqa: ARG001
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _window_except_every(period: int) -> Callable[[Config, int], int | None]:
    """Return a rule: every `period`-th layer has full attention, others a window (Gemma 2 and 3, GPT-OSS)."""

    def window(config: Config, index: int) -> int | None:
        each = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or period
        return config.get("sliding_window") if (index + 1) % each else None

    return window


def _no_experts(config: Config, index: int) -> bool:  # noqa: ARG001
    return False


def _experts_everywhere(config: Config, index: int) -> bool:  # noqa: ARG001
    return True


def _experts_by_step(config: Config, index: int) -> bool:
    """Return True for every `decoder_sparse_step`-th layer, except `mlp_only_layers` (Qwen MoE)."""
    step = config.get("decoder_sparse_step", 1)
    return index not in (config.get("mlp_only_layers") or ()) and step > 0 and (index + 1) % step == 0


def _experts_after_dense(config: Config, index: int) -> bool:
    """Return True for all layers after the first `first_k_dense_replace` (DeepSeek)."""
    return index >= int(config.get("first_k_dense_replace", 0))


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The rules of a model family: switches, keys, and defaults of optional fields of its `config.json`.

    A switch given as text is the key that holds it. `kernel` is the default of transformers. `rotary_tensors` is the
    number of tensors of the rotary dimension saved per position: a cosine and a sine, or half of each.
    With `learned_positions` the embedding has a row for each of `num_positions`. `unsupported` are values of keys that
    the profile does not know.
    """

    defaults: Config = field(default_factory=dict)
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    mlp_bias: str | bool = False
    qk_norm: NormKind | str | None = None
    norm: NormKind = "rms"
    num_norms: int | str = 2
    gated: bool = True
    head_bias: bool = False
    sinks: bool = False
    latent: bool = False
    window: Callable[[Config, int], int | None] = no_window
    has_experts: Callable[[Config, int], bool] = _no_experts
    expert_width: str = "moe_intermediate_size"
    router_bias: bool = False
    expert_bias: bool = False
    kernel: AttentionKernel = "fused"
    fused_qkv: bool = False
    parallel: str | bool = False
    parallel_residual: str | bool = False
    activation_tensors: int = 1
    rotary: str | bool = True
    rotary_tensors: int = 2
    learned_positions: bool = False
    embedding_norm: bool = False
    unsupported: Config = field(default_factory=dict)


_LLAMA = ModelFamily(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN3 = {"head_dim": 128}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_DEEPSEEK = ModelFamily(
    latent=True,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    has_experts=_experts_after_dense,
    defaults={"first_k_dense_replace": 0, "num_experts_per_tok": 8},
)

_LAYER_NORM = ModelFamily(
    qkv_bias=True, o_bias=True, mlp_bias=True, norm="layer", gated=False, activation_tensors=0, fused_qkv=True
)
"""GPT-2's block, which others vary: LayerNorm, biases everywhere, one product for query, key and value, no gate."""

MODEL_FAMILIES: dict[str, ModelFamily] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": ModelFamily(
        window=_window_everywhere, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": ModelFamily(qkv_bias=True, window=_window_from_layer),
    "Qwen3ForCausalLM": ModelFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="rms",
        window=_window_from_layer,
        defaults=_QWEN3,
    ),
    "GemmaForCausalLM": ModelFamily(
        qkv_bias="attention_bias", o_bias="attention_bias", norm="rms_fp32", defaults=_GEMMA
    ),
    "Gemma2ForCausalLM": ModelFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm="rms_fp32",
        num_norms=4,
        kernel="eager",
        window=_window_except_every(2),
        defaults=_GEMMA
        | {
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": ModelFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm="rms_fp32",
        num_norms=4,
        qk_norm="rms_fp32",
        rotary_tensors=4,
        window=_window_except_every(6),
        defaults=_GEMMA | {"sliding_window": 4096, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "PhiForCausalLM": ModelFamily(
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
    "Phi3ForCausalLM": ModelFamily(window=_window_everywhere, fused_qkv=True),
    "MixtralForCausalLM": ModelFamily(
        window=_window_everywhere,
        has_experts=_experts_everywhere,
        expert_width="intermediate_size",
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
    ),
    "Qwen2MoeForCausalLM": ModelFamily(
        qkv_bias="qkv_bias",
        window=_window_from_layer,
        has_experts=_experts_by_step,
        defaults={"qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "shared_gate": True},
    ),
    "Qwen3MoeForCausalLM": ModelFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="rms",
        window=_window_if_enabled,
        has_experts=_experts_by_step,
        defaults={"num_experts": 128, "num_experts_per_tok": 8},
    ),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "GptOssForCausalLM": ModelFamily(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm="rms_fp32",
        sinks=True,
        kernel="eager",
        activation_tensors=4,
        rotary_tensors=1,
        window=_window_except_every(2),
        has_experts=_experts_everywhere,
        expert_width="intermediate_size",
        router_bias=True,
        expert_bias=True,
        defaults={"attention_bias": True, "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4},
    ),
}
MODEL_FAMILIES |= {
    "GPT2LMHeadModel": replace(_LAYER_NORM, rotary=False, learned_positions=True),
    "GPTNeoXForCausalLM": replace(
        _LAYER_NORM, qkv_bias="attention_bias", o_bias="attention_bias", parallel_residual="use_parallel_residual",
        defaults={"use_parallel_residual": True},
    ),
    "OPTForCausalLM": replace(
        _LAYER_NORM,
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        mlp_bias="enable_bias",
        fused_qkv=False,
        rotary=False,
        learned_positions=True,
        unsupported={
            "do_layer_norm_before": False,
            "layer_norm_elementwise_affine": False,
            "_remove_final_layer_norm": True,
        },
    ),
    "MptForCausalLM": replace(
        _LAYER_NORM, qkv_bias="biased", o_bias="biased", mlp_bias="biased", norm="layer_gain", kernel="eager",
        rotary=False, unsupported={"biased": True},
    ),
    "FalconForCausalLM": replace(
        _LAYER_NORM, qkv_bias="bias", o_bias="bias", mlp_bias="bias", num_norms="num_layer_norms",
        parallel="shares_norm", parallel_residual="parallel_attn", rotary="rotary", kernel="eager",
        defaults={"parallel_attn": True},
    ),
    # BLOOM's GELU is a function of its own that keeps its input alone.
    "BloomForCausalLM": replace(_LAYER_NORM, kernel="eager", rotary=False, embedding_norm=True),
}  # fmt: skip
MODEL_FAMILIES["Gemma3ForConditionalGeneration"] = MODEL_FAMILIES["Gemma3ForCausalLM"]


def model_family(architecture: str) -> ModelFamily:
    """Return the family of a Hugging Face class name; raise `ModelError` for an unknown one."""
    if architecture not in MODEL_FAMILIES:
        raise ModelError(
            f"no profile for the architecture '{architecture}'",
            hint="supported: " + ", ".join(sorted(MODEL_FAMILIES)),
        )
    return MODEL_FAMILIES[architecture]
