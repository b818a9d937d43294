"""`Model`: what the user names (a Hugging Face folder or a `config.json`), read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.core.base import Count, Frozen, Index
from isthmus.core.errors import ModelError

TRAINABLE = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures that the runtime cuts by layers and trains."""


class Model(Frozen):
    """The dimensions of a decoder-only transformer, as its `config.json` states them."""

    path: str
    architecture: str
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    intermediate_size: Count
    vocab_size: Count
    tied_embeddings: bool = False
    num_experts: Index = 0
    experts_per_token: Index = 0
    moe_intermediate_size: Index = 0
    dense_layers: tuple[Index, ...] = ()
    qk_norm: bool = False
    attention_bias: bool = False

    def is_moe(self, layer: int) -> bool:
        """Tell whether decoder layer `layer` has experts instead of one feed-forward block."""
        return self.num_experts > 0 and layer not in self.dense_layers


def config_path(path: str | Path) -> Path:
    """Return the `config.json` meant by a folder or a file; raise `ModelError` if it is not there."""
    given = Path(path)
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise ModelError(
            f"no model at {given}",
            hint="give a folder that holds a config.json, or the config.json itself",
        )
    return file


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a folder or file."""
    file = config_path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object")
    return config


def load_model(path: str | Path) -> Model:
    """Read a `Model` from a Hugging Face folder or `config.json`.

    Raises `ModelError` where the file is missing, is not JSON, lacks a dimension, or names an
    architecture that is not in `TRAINABLE`.
    """
    config = read_config(path)
    file = config_path(path)
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in TRAINABLE:
        raise ModelError(
            f"{file}: architecture '{architecture}' is not supported",
            hint="supported: " + ", ".join(TRAINABLE),
        )
    try:
        return _from_config(config, path=str(path), architecture=architecture)
    except KeyError as error:
        raise ModelError(f"{file}: {error.args[0]} is missing") from error
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error


def _from_config(config: dict[str, Any], *, path: str, architecture: str) -> Model:
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    num_experts = config.get("num_local_experts") or config.get("num_experts") or 0
    moe = architecture in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    dense: tuple[int, ...] = ()
    if architecture == "Qwen3MoeForCausalLM":
        step = config.get("decoder_sparse_step", 1)
        only = set(config.get("mlp_only_layers") or ())
        dense = tuple(i for i in range(num_layers) if i in only or (i + 1) % step != 0)
    return Model(
        path=path,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=num_experts if moe else 0,
        experts_per_token=config.get("num_experts_per_tok", 2) if moe else 0,
        moe_intermediate_size=(config.get("moe_intermediate_size") or config["intermediate_size"]) if moe else 0,
        dense_layers=dense,
        qk_norm=architecture.startswith("Qwen3"),
        attention_bias=bool(config.get("attention_bias", False)),
    )
