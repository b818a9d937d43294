"""Build the transformers model that a `config.json` describes, on the meta device."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from isthmus.core.base_model import AttentionKernelName
from isthmus.core.errors import ModelError
from isthmus.core.model import config_path, load_model, read_config, require_trainable

_CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError)
"""Errors that transformers raises for an invalid configuration."""

_IMPLEMENTATIONS: dict[AttentionKernelName, str] = {
    "sdpa": "sdpa",
    "flash": "sdpa",
    "flex": "flex_attention",
    "eager": "eager",
}
"""The name that transformers has for a kernel; `flash` is the only backend that `sdpa` may then choose."""

GROUPED_MM_ALIGNMENT = 8
"""Elements per 16 bytes of bf16: torch's grouped matrix products need rows of a multiple of 16 bytes."""


def model_class(model: str | Path) -> type[PreTrainedModel]:
    """Return the transformers class that `model` (a folder or a `config.json`) names.

    Raises `ModelError` if the file cannot be read or Isthmus does not train the architecture.
    """
    described = load_model(model)
    require_trainable(described)
    cls: type[PreTrainedModel] = getattr(transformers, described.architecture)
    return cls


def read_transformers_config(model: str | Path, attention: AttentionKernelName = "sdpa") -> PretrainedConfig:
    """Return the complete transformers configuration of `model`, with the kernel `attention`.

    Raises `ModelError` if transformers rejects a value.
    """
    config_class = model_class(model).config_class
    try:
        config = config_class.from_dict(read_config(model))
    except (*_CONFIG_ERRORS, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{config_path(model)}: {reason}", hint="compare it with a published model") from error
    config._attn_implementation = _IMPLEMENTATIONS[attention]
    return config


def build_meta_model(model: str | Path, attention: AttentionKernelName = "sdpa") -> PreTrainedModel:
    """Return the full model on the meta device: all modules, names and shapes without memory.

    Raises `ModelError` if the dimensions of the configuration are inconsistent.
    """
    config = read_transformers_config(model, attention)
    try:
        with torch.device("meta"):
            return model_class(model)(config)
    except _CONFIG_ERRORS as error:
        raise ModelError(f"{config_path(model)}: {error}", hint="compare it with a published model") from error


def choose_expert_kernels(
    config: PretrainedConfig, device: torch.device | str, tp_size: int = 1, *, one_by_one: bool = False
) -> None:
    """Choose in `config` how experts are computed on `device`, each sharded over `tp_size` ranks.

    A CPU computes the experts one by one, in two thirds of the time of a grouped product (14 million
    parameters, 4 experts, 1024 tokens, one core). Other devices keep the transformers default if the row
    sizes satisfy the alignment of torch's grouped product, unless products of 8 bits need them `one_by_one`.
    """
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    fits = config.hidden_size % GROUPED_MM_ALIGNMENT == 0 and width % (tp_size * GROUPED_MM_ALIGNMENT) == 0
    if one_by_one or torch.device(device).type == "cpu" or not fits:
        config._experts_implementation = "eager"


def rotary_embedding(full: PreTrainedModel, device: torch.device | str) -> nn.Module:
    """Return the rotary embedding of the meta model `full` with real buffers on `device`."""
    with torch.device("cpu"):
        rotary: nn.Module = type(full.model.rotary_emb)(config=full.config)
    return rotary.to(device)


def sliding_window_layers(config: PretrainedConfig) -> frozenset[int]:
    """Return the indices of layers with sliding-window attention.

    Mixtral and Qwen3-MoE use the window in all layers if it is set, Qwen2-MoE and Qwen3 as `layer_types` says, Llama
    never.
    """
    num_layers = config.num_hidden_layers
    if config.model_type in ("qwen2_moe", "qwen3"):
        return frozenset(i for i in range(num_layers) if config.layer_types[i] == "sliding_attention")
    if config.model_type == "llama" or getattr(config, "sliding_window", None) is None:
        return frozenset()
    return frozenset(range(num_layers))
