"""Models and pools that published runs used and no `config.json` in this repository describes."""

from __future__ import annotations

from functools import cache
from typing import Any

from isthmus.core.model import Model
from isthmus.core.plan import Plan, Stage
from isthmus.core.pool import Pool
from isthmus.plan.profile.attention import attention_component
from isthmus.plan.profile.component import Component, SavedTensor, Weight
from isthmus.plan.profile.decoder_layer import feed_forward_component, norms_component
from isthmus.plan.profile.layer_profile import LayerProfile, ModelProfile
from isthmus.plan.profile.layer_shapes import AttentionKernel, AttentionShape, FeedForwardShape, LayerShape
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.profile.norms import norm_saved_tensors

GPT_VOCABULARY = 51200
"""The GPT-2 vocabulary as Megatron-LM pads it."""


@cache
def gpt(hidden: int, heads: int, layers: int, kernel: AttentionKernel = "eager") -> ModelProfile:
    """Return a GPT of Megatron-LM: biases, GELU, layer norms, a head tied to the embedding."""
    each = hidden // heads
    block = AttentionShape(
        hidden_size=hidden, num_heads=heads, num_kv_heads=heads, head_dim=each, value_dim=each,
        qkv_bias=True, o_bias=True, kernel=kernel,
    )  # fmt: skip
    dense = FeedForwardShape(hidden_size=hidden, intermediate_size=4 * hidden, gated=False, bias=True)
    layer = LayerProfile(
        hidden_size=hidden,
        attention=attention_component(block),
        feed_forward=feed_forward_component(dense),
        norms=norms_component(LayerShape(attention=block, feed_forward=dense, norm="layer")),
    )
    size = GPT_VOCABULARY * hidden
    head = Component(
        name="head",
        kind="head",
        weights=(Weight(name="head", matrix_elements=size, copies=0, max_pieces=GPT_VOCABULARY),),
        saved=(
            SavedTensor(name="head.input", width=hidden),
            SavedTensor(name="log_probabilities", width=GPT_VOCABULARY, element_bytes=4, cut="tp"),
        ),
    )
    table = Weight(name="embedding", vector_elements=size, max_pieces=GPT_VOCABULARY)
    return ModelProfile(
        architecture="GPT",
        hidden_size=hidden,
        vocab_size=GPT_VOCABULARY,
        embedding=Component(name="embedding", kind="embedding", weights=(table,)),
        layers=(layer,) * layers,
        final_norm=Component(
            name="final_norm",
            kind="norm",
            weights=(Weight(name="final_norm", vector_elements=2 * hidden),),
            saved=norm_saved_tensors("final_norm", "layer", hidden),
        ),
        head=head,
        tied_embeddings=True,
        position_width=0,
    )


def llama(hidden: int, heads: int, layers: int, ffn: int, vocabulary: int, kv_heads: int = 0) -> ModelProfile:
    """Return a Llama of these dimensions."""
    return _profile(
        "LlamaForCausalLM", hidden, heads, layers, vocabulary,
        num_key_value_heads=kv_heads or heads, intermediate_size=ffn,
    )  # fmt: skip


def mixtral(layers: int) -> ModelProfile:
    """Return Mixtral 8x7B with another number of layers: 70 make 101 B parameters, 56 make 80 B."""
    return _profile(
        "MixtralForCausalLM", 4096, 32, layers, 32000,
        num_key_value_heads=8, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def _profile(kind: str, hidden: int, heads: int, layers: int, vocabulary: int, **more: Any) -> ModelProfile:
    config = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    return profile_model(
        Model(
            path=kind,
            architecture=kind,
            num_layers=layers,
            hidden_size=hidden,
            vocab_size=vocabulary,
            config=config | more,
        )
    )


@cache
def cluster(chip: str, chips: int, gbps: float) -> Pool:
    """Return a pool of one cluster of nodes of eight; `gbps` is the network of each chip."""
    group = {
        "name": "g",
        "chip": chip,
        "nodes": max(1, chips // 8),
        "chips_per_node": 8,
        "network_gbps": gbps,
    }
    own = [
        {
            "name": "H800",
            "vendor": "NVIDIA",
            "peak_flop_per_s": {
                "fp32": 67.0e12,
                "tf32": 494.5e12,
                "bf16": 989.5e12,
                "fp16": 989.5e12,
                "fp8": 1979.0e12,
            },
            "memory_bytes": "80 GB",
            "memory_bandwidth_bytes_per_s": 3.35e12,
            "in_node_link": {"name": "NVLink4", "bandwidth_bytes_per_s": 200.0e9},
            "source": "H100 SXM with NVLink at 400 GB/s",
        }
    ]
    return Pool.model_validate({"clusters": [{"name": "c", "owner": "o", "node_groups": [group]}], "chips": own})


def even_plan(layers: int, *, tp: int, pp: int, dp: int, cp: int = 1, **fields: Any) -> Plan:
    """Return a plan of `dp` equal replicas on one cluster, layers dealt out evenly."""
    own = {key: fields.pop(key) for key in list(fields) if key in Stage.model_fields and key not in Plan.model_fields}
    stages = tuple(
        Stage(
            replica=replica,
            cluster="c",
            node_group="g",
            layers=(i * layers // pp, (i + 1) * layers // pp),
            tp=tp,
            cp=cp,
            **own,
        )
        for replica in range(dp)
        for i in range(pp)
    )
    return Plan(id="published", stages=stages, dp=dp, **fields)
