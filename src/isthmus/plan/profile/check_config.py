"""`check_config`: dimensions of a `config.json` are of their kind and go together, or it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from isthmus.core.errors import ModelError
from isthmus.core.model import LARGEST

_LEAST: Mapping[str, int] = {
    "head_dim": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": 1,
    "sliding_window": 0,
    "sliding_window_pattern": 0,
    "max_window_layers": 0,
    "decoder_sparse_step": 0,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
}
"""Whole numbers that a family may leave out, and the least that each may be."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` where a field of `config`, completed by its family's defaults, cannot be meant."""
    for name, least in _LEAST.items():
        value = config.get(name)
        if value is not None and not is_whole(value, least):
            raise _wrong(name, value, f"a whole number from {least} to {LARGEST:,} is needed")
    factor = config.get("partial_rotary_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise _wrong("partial_rotary_factor", factor, "a number above 0, 1 at most, is needed")
    _check_lists(config)
    _check_heads(config)


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Tell whether `value` is a whole number from `least` to `LARGEST`, and neither true nor false."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _check_lists(config: Mapping[str, Any]) -> None:
    kinds, num_layers = config.get("layer_types"), config.get("num_hidden_layers", 0)
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) >= num_layers):
        raise _wrong("layer_types", kinds, f"a list of the {num_layers} layers' kinds is needed")
    dense = config.get("mlp_only_layers")
    if dense is not None and not isinstance(dense, list):
        raise _wrong("mlp_only_layers", dense, "a list of layers is needed")


def _check_heads(config: Mapping[str, Any]) -> None:
    """Queries are dealt out evenly to keys and values, and a head is at least one number wide."""
    heads = config.get("num_attention_heads")
    if not is_whole(heads, 1):
        raise _wrong("num_attention_heads", heads, "a whole number of at least 1 is needed")
    pairs = config.get("num_key_value_heads")
    if pairs is not None and heads % pairs:
        raise _wrong("num_key_value_heads", pairs, f"it divides num_attention_heads, {heads}")
    if config.get("head_dim") is None and config.get("hidden_size", heads) < heads:
        raise _wrong("num_attention_heads", heads, f"hidden_size is {config['hidden_size']}, which is less")


def _wrong(name: str, value: Any, hint: str) -> ModelError:
    return ModelError(f"config.json: {name} is {value!r:.80}", hint=hint)
