"""`with_standard_keys`: a `config.json` of an older family, completed with the names of dimensions that others use.

GPT-2, GPT-NeoX, OPT, MPT, Falcon and BLOOM name their dimensions in their own ways, and leave some to their classes in
transformers, whose defaults these are. Every other architecture is returned as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Config = Mapping[str, Any]

ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "GPT2LMHeadModel": {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
        },
        "GPTNeoXForCausalLM": {"partial_rotary_factor": "rotary_pct"},
        "OPTForCausalLM": {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        "MptForCausalLM": {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        "FalconForCausalLM": {
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
        },
        "BloomForCausalLM": {
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
    }
)
"""By architecture, the own key of a standard one."""

_DEFAULTS: Mapping[str, Config] = MappingProxyType(
    {
        "GPT2LMHeadModel": {"max_position_embeddings": 1024, "hidden_act": "gelu_new", "tie_word_embeddings": True},
        "GPTNeoXForCausalLM": {"attention_bias": True, "hidden_act": "gelu"},
        "OPTForCausalLM": {
            "max_position_embeddings": 2048,
            "hidden_act": "relu",
            "enable_bias": True,
            "tie_word_embeddings": True,
        },
        "MptForCausalLM": {"hidden_act": "gelu", "tie_word_embeddings": True},
        "FalconForCausalLM": {"hidden_act": "gelu", "tie_word_embeddings": True},
        "BloomForCausalLM": {"hidden_act": "gelu", "tie_word_embeddings": True},
    }
)


def with_standard_keys(architecture: str, config: Config) -> dict[str, Any]:
    """Return `config` with the standard keys that its class in transformers derives from its own ones.

    Values are not checked here: one of a wrong type stays for the check of the standard key.
    """
    if architecture not in ALIASES:
        return dict(config)
    named = {key: config[own] for key, own in ALIASES[architecture].items() if config.get(own) is not None}
    stated = {key: value for key, value in config.items() if value is not None}
    whole = {**_DEFAULTS[architecture], **stated, **named}
    derive = _DERIVED.get(architecture)
    return {**whole, **(derive(whole) if derive else {})}


def _times(config: Config, factor: object) -> dict[str, Any]:
    """Return an intermediate size of `factor` times the hidden size, where the file states none."""
    hidden = config.get("hidden_size")
    whole = isinstance(hidden, int) and isinstance(factor, int)
    return {"intermediate_size": hidden * factor} if whole and "intermediate_size" not in config else {}  # type: ignore[operator]


def _gpt2(config: Config) -> dict[str, Any]:
    return {**_times(config, 4), "num_positions": config["max_position_embeddings"]}


def _gpt_neox(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    share = rope.get("partial_rotary_factor", 0.25) if isinstance(rope, dict) else 0.25
    return {"partial_rotary_factor": config.get("partial_rotary_factor", share)}


def _opt(config: Config) -> dict[str, Any]:
    """Two rows of the position table are for padding (`OPTLearnedPositionalEmbedding`)."""
    positions = config["max_position_embeddings"]
    return {"num_positions": positions + 2 if isinstance(positions, int) else positions}


def _mpt(config: Config) -> dict[str, Any]:
    """Query, key and value of MPT have as many heads, or the number that `attn_config` states."""
    attention = config.get("attn_config")
    heads = attention.get("kv_n_heads") if isinstance(attention, dict) else None
    biased = not config.get("no_bias", True)
    return {**_times(config, config.get("expansion_ratio", 4)), "biased": biased} | (
        {} if heads is None else {"num_key_value_heads": heads}
    )


def _falcon(config: Config) -> dict[str, Any]:
    """Falcon-7B shares one key and value head; the newer decoder (40B, 180B) states theirs and has two norms."""
    newer, parallel = bool(config.get("new_decoder_architecture")), bool(config.get("parallel_attn", True))
    stated = config.get("num_ln_in_parallel_attn")
    norms = (2 if stated is None else stated) if newer else 1 if parallel else 2
    heads = config.get("num_kv_heads") if newer else 1 if config.get("multi_query", True) else None
    return {
        **_times(config, 4),
        "num_layer_norms": norms,
        "shares_norm": norms == 1,
        "rotary": not config.get("alibi"),
    } | ({} if heads is None else {"num_key_value_heads": heads})


def _bloom(config: Config) -> dict[str, Any]:
    return _times(config, 4)


_DERIVED: Mapping[str, Callable[[Config], dict[str, Any]]] = MappingProxyType(
    {
        "GPT2LMHeadModel": _gpt2,
        "GPTNeoXForCausalLM": _gpt_neox,
        "OPTForCausalLM": _opt,
        "MptForCausalLM": _mpt,
        "FalconForCausalLM": _falcon,
        "BloomForCausalLM": _bloom,
    }
)
