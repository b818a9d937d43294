"""`model_sizes`: what a plan of a profiled model must divide."""

from __future__ import annotations

from isthmus.core.runs.planned_sizes import ModelSizes
from isthmus.plan.profile.layer_profile import ModelProfile


def model_sizes(profile: ModelProfile) -> ModelSizes:
    """Return the layers, heads and experts of a profile; without attention, no degree is refused for heads."""
    cores = [layer.attention.core for layer in profile.layers if layer.attention.core]
    return ModelSizes(
        num_layers=profile.num_layers,
        num_heads=cores[0].num_heads if cores else 0,
        num_kv_heads=cores[0].num_kv_heads if cores else 0,
        num_experts=max(layer.feed_forward.num_experts for layer in profile.layers),
        has_latent=any(weight.name == "kv_b" for layer in profile.layers for weight in layer.attention.weights),
        has_shared=any(layer.feed_forward.shared_experts for layer in profile.layers),
        hidden_size=profile.hidden_size,
    )
