"""Models of a few thousand parameters, one per way an architecture can differ, for the tests of `train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 61
NUM_LAYERS = 4

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "pad_token_id": 3}),
    "llama-scaled-rope": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-tied-window": (
        "Qwen3ForCausalLM",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
        },
    ),
    "mixtral": ("MixtralForCausalLM", _MIXTRAL),
    "mixtral-tied-window": (
        "MixtralForCausalLM",
        {**_MIXTRAL, "tie_word_embeddings": True, "sliding_window": 5},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {**_QWEN_MOE, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_QWEN_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-tied-sparse": (
        "Qwen3MoeForCausalLM",
        {**_QWEN_MOE, "tie_word_embeddings": True, "decoder_sparse_step": 2},
    ),
}


def write_config(folder: Path, variant: str, **changes: Any) -> Path:
    """Write the `config.json` of `variant` into `folder` and return the folder."""
    architecture, fields = VARIANTS[variant]
    config = getattr(transformers, architecture).config_class(**{**_SHARED, **fields, **changes})
    folder.mkdir(parents=True, exist_ok=True)
    text = {**config.to_dict(), "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
    return folder


def whole_model(folder: Path, *, seed: int = 0) -> transformers.PreTrainedModel:
    """Return the whole model of `folder` as transformers initialises it, but with uneven norms."""
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    return model


def save_model(folder: Path, variant: str, **changes: Any) -> transformers.PreTrainedModel:
    """Write `variant` with weights into `folder` as transformers does, and return the model."""
    model = whole_model(write_config(folder, variant, **changes))
    model.save_pretrained(folder)
    return model


def token_ids(batch: int = 2, length: int = 11) -> torch.Tensor:
    """Return fixed token ids `[batch, length]`."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))
