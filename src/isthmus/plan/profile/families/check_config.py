"""`check_config`: validates the types, ranges and consistency of the dimensions in a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from isthmus.core.errors import ModelError
from isthmus.core.model import MAX_DIMENSION

_MIN_VALUES: Mapping[str, int] = {
    "head_dim": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": 1,
    "sliding_window": 0,
    "sliding_window_pattern": 0,
    "max_window_layers": 0,
    "decoder_sparse_step": 0,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 0,
}
"""Optional integer fields and their minimum values."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` for an invalid field of `config`, which includes its family's defaults."""
    for name, least in _MIN_VALUES.items():
        value = config.get(name)
        if value is not None and not is_integer_from(value, least):
            raise _config_error(name, value, f"it must be an integer from {least} to {MAX_DIMENSION:,}")
    factor = config.get("partial_rotary_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise _config_error("partial_rotary_factor", factor, "it must be a number above 0 and at most 1")
    _check_lists(config)
    _check_heads(config)


def is_integer_from(value: Any, minimum: int) -> TypeGuard[int]:
    """Return whether `value` is an integer (not a bool) from `minimum` to `MAX_DIMENSION`."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_DIMENSION


def _check_lists(config: Mapping[str, Any]) -> None:
    kinds, num_layers = config.get("layer_types"), config.get("num_hidden_layers", 0)
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) >= num_layers):
        raise _config_error("layer_types", kinds, f"it must be a list of the types of {num_layers} layers")
    dense = config.get("mlp_only_layers")
    if dense is not None and not isinstance(dense, list):
        raise _config_error("mlp_only_layers", dense, "it must be a list of layers")


def _check_heads(config: Mapping[str, Any]) -> None:
    """Raise unless key-value heads divide query heads, and a head has at least one dimension."""
    heads = config.get("num_attention_heads")
    if not is_integer_from(heads, 1):
        raise _config_error("num_attention_heads", heads, "it must be an integer of at least 1")
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise _config_error("num_key_value_heads", kv_heads, f"it must divide num_attention_heads, {heads}")
    if config.get("head_dim") is None and config.get("hidden_size", heads) < heads:
        raise _config_error("num_attention_heads", heads, f"it must be at most hidden_size, {config['hidden_size']}")


def _config_error(name: str, value: Any, hint: str) -> ModelError:
    return ModelError(f"config.json: {name} is {value!r:.80}", hint=hint)
