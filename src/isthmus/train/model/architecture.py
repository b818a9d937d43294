"""From a `config.json` to the transformers model it describes, without allocating a single weight."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from isthmus.core.errors import ModelError
from isthmus.core.model import config_path, load_model, read_config, require_trainable

_REFUSALS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError)
"""What transformers raises for a configuration that makes no sense."""

GROUPED_ELEMENTS = 8
"""Rows of grouped products are multiples of 16 bytes: of so many numbers in bf16, the shortest type here."""


def model_class(model: str | Path) -> type[PreTrainedModel]:
    """Return the transformers class that `model` (a folder or a `config.json`) names.

    Raises `ModelError` where the file cannot be read or the architecture is not one that Isthmus trains.
    """
    described = load_model(model)
    require_trainable(described)
    cls: type[PreTrainedModel] = getattr(transformers, described.architecture)
    return cls


def read_architecture(model: str | Path) -> PretrainedConfig:
    """Return the complete configuration of `model`, defaults filled in, set to attention through sdpa.

    Raises `ModelError` where transformers refuses a value.
    """
    config_class = model_class(model).config_class
    try:
        config = config_class.from_dict(read_config(model))
    except (*_REFUSALS, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{config_path(model)}: {reason}", hint="compare it with a published model"
        ) from error
    config._attn_implementation = "sdpa"
    return config


def meta_model(model: str | Path) -> PreTrainedModel:
    """Return the whole of `model` on the meta device: every name, shape and module, and no memory.

    Raises `ModelError` where the dimensions of the configuration contradict each other.
    """
    config = read_architecture(model)
    try:
        with torch.device("meta"):
            return model_class(model)(config)
    except _REFUSALS as error:
        raise ModelError(
            f"{config_path(model)}: {error}", hint="compare it with a published model"
        ) from error


def choose_kernels(config: PretrainedConfig, device: torch.device | str, num_shares: int = 1) -> None:
    """Set in `config` how experts are computed on `device`, each cut into `num_shares`.

    A CPU goes through the experts one by one, which takes two thirds of the time of a grouped product there
    (14 million parameters, 4 experts, 1024 tokens, one core); other devices keep the default of transformers,
    unless rows are no multiples of what torch's grouped product takes.
    """
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    fits = config.hidden_size % GROUPED_ELEMENTS == 0 and width % (num_shares * GROUPED_ELEMENTS) == 0
    if torch.device(device).type == "cpu" or not fits:
        config._experts_implementation = "eager"


def rotary_embedding(full: PreTrainedModel, device: torch.device | str) -> nn.Module:
    """Return the rotary embedding of `full` with real buffers on `device` (those of `full` are on meta)."""
    with torch.device("cpu"):
        rotary: nn.Module = type(full.model.rotary_emb)(config=full.config)
    return rotary.to(device)


def sliding_layers(config: PretrainedConfig) -> frozenset[int]:
    """Return the layers whose attention sees a window of `config.sliding_window` tokens only.

    Mixtral and Qwen3-MoE use the window in every layer as soon as it is set, Qwen3 where `layer_types` says
    so, Llama nowhere.
    """
    num_layers = config.num_hidden_layers
    if config.model_type == "qwen3":
        return frozenset(i for i in range(num_layers) if config.layer_types[i] == "sliding_attention")
    if config.model_type == "llama" or getattr(config, "sliding_window", None) is None:
        return frozenset()
    return frozenset(range(num_layers))
