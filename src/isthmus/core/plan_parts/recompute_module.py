"""`RecomputeModule`: the modules of a layer that selective recomputation can repeat, as Megatron-LM names them."""

from __future__ import annotations

from typing import Literal

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]
"""Source: NVIDIA/Megatron-LM, core/transformer/transformer_config.py, `recompute_modules`."""
