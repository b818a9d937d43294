"""Small transformers models with random weights, for engines."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

SIZES = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip

CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=4, num_experts_per_tok=2
    ),
    "mixtral": MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, tie_word_embeddings=False
    ),
}


def make_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model whose logits differ from token to token: larger weights than transformers draws."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() > 1:
                one.mul_(4)
    return model.eval()


def weights_of(config: PretrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of `make_model`."""
    return make_model(config, seed).state_dict()
