"""Models, pools and questions for the benchmarks of the planner."""

from __future__ import annotations

import random
from typing import Any

from isthmus.core.job import CheckpointConfig, DataConfig, Job, PlacementConstraints, TrainingConfig
from isthmus.core.model import Model
from isthmus.core.pool import Pool
from isthmus.plan.profile.layer_profile import ModelProfile
from isthmus.plan.profile.model_profile import profile_model


def llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int) -> ModelProfile:
    """Return the profile of a Llama of these dimensions, with 32,000 words."""
    config = {
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": 32000,
    }
    return profile_model(
        Model(
            path="llama", architecture="LlamaForCausalLM", num_layers=layers, hidden_size=hidden,
            vocab_size=32000, config=config,
        )
    )  # fmt: skip


def gemma2_27b() -> ModelProfile:
    """Return the profile of Gemma-2 27B: every other layer attends to a window."""
    config = {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 4608, "intermediate_size": 36864,
        "num_hidden_layers": 46, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "sliding_window": 4096,
    }  # fmt: skip
    return _profile("Gemma2ForCausalLM", config)


def deepseek_v2_lite() -> ModelProfile:
    """Return the profile of DeepSeek-V2-Lite: the first layer is dense, the others have experts."""
    config = {
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    return _profile("DeepseekV2ForCausalLM", config)


def _profile(architecture: str, config: dict[str, Any]) -> ModelProfile:
    return profile_model(
        Model(
            path="model", architecture=architecture, num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"], vocab_size=config["vocab_size"], config=config,
        )
    )  # fmt: skip


LLAMA2_7B = (32, 4096, 11008, 32, 32)
LLAMA2_70B = (80, 8192, 28672, 64, 8)


def job(samples: int, sequence_length: int = 4096, placement: PlacementConstraints | None = None) -> Job:
    """Return a job of `samples` sequences a step."""
    return Job(
        name="bench",
        model="llama",
        data=DataConfig(paths=("text",)),
        training=TrainingConfig(steps=1, sequence_length=sequence_length, global_batch_size=samples),
        checkpoints=CheckpointConfig(folder="checkpoints"),
        output="output",
        placement=placement or PlacementConstraints(),
    )


def pool(sites: dict[str, list[tuple[str, int]]], gbps: float, round_trip_ms: float) -> Pool:
    """Return clusters of node groups (chip, number of chips) in nodes of eight, joined each to each."""
    names = list(sites)
    return Pool.model_validate(
        {
            "clusters": [
                {
                    "name": name,
                    "owner": "bench",
                    "node_groups": [
                        {"name": f"g{i}", "chip": chip, "nodes": max(1, count // 8), "chips_per_node": 8}
                        for i, (chip, count) in enumerate(groups)
                    ],
                }
                for name, groups in sites.items()
            ],
            "links": [
                {"between": [a, b], "bandwidth_gbps": gbps, "round_trip_ms": round_trip_ms}
                for i, a in enumerate(names)
                for b in names[i + 1 :]
            ],
        }
    )


TOY = llama(6, 1024, 2816, 16, 16)
"""A model of 135 million parameters: small enough for every plan of it to be simulated."""

TOY_BYTES = 18.0 * TOY.num_parameters


def small_pool(chance: random.Random, clusters: int = 3, chips: int = 2, links: float = 40.0) -> Pool:
    """Return a random small pool of unlike chips whose memory is hardly enough for `TOY`."""
    count = chance.randint(1, clusters)
    sizes = [chance.randint(1, chips) for _ in range(count)]
    fullness = chance.uniform(0.5, 1.2)
    shares = [chance.uniform(0.7, 1.3) for _ in sizes]
    whole = sum(share * size for share, size in zip(shares, sizes, strict=True))
    kinds = [
        {
            "name": f"chip{i}",
            "peak_flop_per_s": {"bf16": chance.uniform(2e13, 2e14)},
            "memory_bytes": round(1.6 * TOY_BYTES / fullness * shares[i] / whole),
            "memory_bandwidth_bytes_per_s": chance.uniform(5e11, 3e12),
            "in_node_link": {"name": "link", "bandwidth_bytes_per_s": chance.uniform(2e10, 4e11)},
            "power_w": chance.uniform(200, 700),
        }
        for i in range(count)
    ]
    return Pool.model_validate(
        {
            "chips": kinds,
            "clusters": [
                {
                    "name": f"site{i}",
                    "owner": "bench",
                    "node_groups": [
                        {
                            "name": "g",
                            "chip": f"chip{i}",
                            "nodes": 1,
                            "chips_per_node": size,
                            "price_per_chip_hour": chance.uniform(0.5, 3),
                        }
                    ],
                }
                for i, size in enumerate(sizes)
            ],
            "links": [
                {
                    "between": [f"site{i}", f"site{j}"],
                    "bandwidth_gbps": chance.uniform(1, links),
                    "round_trip_ms": chance.uniform(1, 30),
                }
                for i in range(count)
                for j in range(i + 1, count)
            ],
        }
    )
