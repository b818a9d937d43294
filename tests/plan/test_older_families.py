"""GPT-2, GPT-NeoX, OPT, MPT, Falcon and BLOOM: own keys of dimensions, variants, and what is refused."""

import json
import math

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from isthmus.core.errors import ModelError
from isthmus.core.model import load_model
from isthmus.plan import DATA_SHEET, predict, profile_model
from tests.plan.hand import plan_of, pool_of

SMALL = {
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 90}),
    "GPTNeoXForCausalLM": (
        "gpt_neox",
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "vocab_size": 90,
        },
    ),
    "OPTForCausalLM": (
        "opt",
        {
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 96,
            "vocab_size": 90,
            "word_embed_proj_dim": 48,
        },
    ),
    "MptForCausalLM": ("mpt", {"d_model": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 90}),
    "FalconForCausalLM": (
        "falcon",
        {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90},
    ),
    "BloomForCausalLM": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": 90}),
}
VARIANTS = [
    ("GPT2LMHeadModel", {}),
    ("GPT2LMHeadModel", {"n_inner": 100, "tie_word_embeddings": False}),
    ("GPTNeoXForCausalLM", {}),
    ("GPTNeoXForCausalLM", {"attention_bias": False, "use_parallel_residual": False}),
    ("OPTForCausalLM", {}),
    ("OPTForCausalLM", {"enable_bias": False, "max_position_embeddings": 100}),
    ("MptForCausalLM", {}),
    ("MptForCausalLM", {"tie_word_embeddings": False}),
    ("FalconForCausalLM", {}),
    ("FalconForCausalLM", {"multi_query": False, "bias": True}),
    ("FalconForCausalLM", {"parallel_attn": False, "alibi": True}),
    ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("BloomForCausalLM", {}),
]


def saved(tmp_path, architecture, fields):
    """Write the `config.json` that the class of transformers writes, and read it as a model."""
    kind, own = SMALL[architecture]
    config = CONFIG_MAPPING[kind](**(own | fields))
    document = config.to_diff_dict() | own | fields | {"architectures": [architecture]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return config, load_model(file)


@pytest.mark.parametrize(("architecture", "fields"), VARIANTS)
def test_variants_have_the_parameters_of_their_class(tmp_path, architecture, fields):
    """Biases, norms, shared heads, positions: exactly those of a model of transformers, on the meta device."""
    config, model = saved(tmp_path, architecture, fields)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert profile_model(model).num_parameters == sum(one.numel() for one in module.parameters())


@pytest.mark.parametrize("architecture", list(SMALL))
def test_a_plan_of_an_older_family_has_a_time(tmp_path, architecture):
    """Every family goes through memory, time and simulator."""
    _, model = saved(tmp_path, architecture, {})
    plan = plan_of(layers=2, clusters="a", sequence_length=64)
    forecast = predict(plan, pool_of("H100"), model, DATA_SHEET)
    assert math.isfinite(forecast.iteration_s)
    assert forecast.iteration_s > 0
    assert all(0 < memory.allocated_bytes < 1e11 for memory in forecast.memory)


@pytest.mark.parametrize(
    ("architecture", "fields", "named"),
    [
        ("GPT2LMHeadModel", {"n_embd": None}, "hidden_size"),
        ("GPT2LMHeadModel", {"n_embd": -48}, "hidden_size"),
        ("GPT2LMHeadModel", {"n_embd": "48"}, "hidden_size"),
        ("GPT2LMHeadModel", {"n_layer": 10**9}, "num_hidden_layers"),
        ("GPT2LMHeadModel", {"n_positions": float("nan")}, "num_positions"),
        ("GPT2LMHeadModel", {"n_head": True}, "num_attention_heads"),
        ("GPTNeoXForCausalLM", {"rotary_pct": -1.0}, "partial_rotary_factor"),
        ("GPTNeoXForCausalLM", {"rope_parameters": 7, "rotary_pct": "x"}, "partial_rotary_factor"),
        ("OPTForCausalLM", {"max_position_embeddings": []}, "num_positions"),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 24}, "word_embed_proj_dim"),
        ("MptForCausalLM", {"expansion_ratio": "4"}, "intermediate_size"),
        ("MptForCausalLM", {"attn_config": {"kv_n_heads": 3}}, "num_key_value_heads"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 3}, "num_key_value_heads"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 0}, "num_layer_norms"),
    ],
)
def test_a_key_that_cannot_be_is_refused_by_its_name(tmp_path, architecture, fields, named):
    """No dimension of a wrong type or range, and no variant without a profile, reaches the arithmetic."""
    document = SMALL[architecture][1] | fields | {"architectures": [architecture]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ModelError, match=named):
        profile_model(load_model(file))
