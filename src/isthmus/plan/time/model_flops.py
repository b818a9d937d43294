"""`mfu_fraction`: model FLOPs utilisation, the share of the chips' peak that the model's own operations use."""

from __future__ import annotations

from collections import Counter

from isthmus.core.chip import Precision
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.plan.profile.layer_profile import ModelProfile


def mfu_fraction(plan: Plan, pool: Pool, profile: ModelProfile, precision: Precision, iteration_s: float) -> float:
    """Return the operations of a step, without recomputation, divided by the peak of all chips of `plan`.

    The definition is that of PaLM (Chowdhery et al., 2022, appendix B). `precision` selects the peak.
    """
    tokens = plan.num_samples * plan.sequence_length
    flops = profile.forward_flops(plan.sequence_length, tokens) + profile.backward_flops(plan.sequence_length, tokens)
    chips: Counter[tuple[str, str]] = Counter()
    for stage in plan.stages:
        chips[stage.cluster, stage.node_group] += stage.num_chips
    peak = sum(count * pool.chip(pool.node_group(*place)).flop_per_s(precision) for place, count in chips.items())
    return flops / (peak * iteration_s) if iteration_s else 0.0
