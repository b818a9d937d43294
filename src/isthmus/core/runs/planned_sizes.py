"""`ModelSizes`: what a plan must divide of its model."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.model import Model
from isthmus.core.runs.check_job import num_experts


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a plan must divide: layers, query heads, key and value heads, routed experts of a layer (0: dense).

    `has_latent`: whether attention is latent; `has_shared`: whether there are shared experts. A hidden size of 0 is
    unknown.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    has_latent: bool = False
    has_shared: bool = False
    hidden_size: int = 0

    @classmethod
    def of(cls, model: Model) -> ModelSizes:
        """Return the sizes of a model by its `config.json`; without heads in it, no degree is refused for them."""
        heads = model.config.get("num_attention_heads")
        return cls(
            num_layers=model.num_layers,
            num_heads=heads if isinstance(heads, int) else 0,
            num_kv_heads=model.num_kv_heads if heads else 0,
            num_experts=num_experts(model),
            has_latent=bool(model.config.get("kv_lora_rank")),
            has_shared=bool(
                model.config.get("n_shared_experts") or model.config.get("shared_expert_intermediate_size")
            ),
            hidden_size=model.hidden_size,
        )
