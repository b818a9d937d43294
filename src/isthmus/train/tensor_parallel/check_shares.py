"""`check_shares`: refuse stages whose tensors cannot be dealt out to as many ranks as the plan says."""

from __future__ import annotations

from isthmus.core.errors import PlanError
from isthmus.core.model import Model
from isthmus.core.plan import Plan

_CUT = ("vocab_size", "intermediate_size", "moe_intermediate_size")


def check_shares(plan: Plan, model: Model) -> None:
    """Raise `PlanError` unless every stage's heads, widths and tokens can be dealt out to its `tp` ranks.

    A key and value head is on one rank, with the queries that look at it: a copy on several would need sums
    of their gradients.
    """
    heads = model.num_kv_heads
    least = min(int(model.config.get(name) or model.hidden_size) for name in _CUT)
    for number, stage in enumerate(plan.stages):
        if heads % stage.tp:
            raise PlanError(
                f"stage {number} asks for tensor parallelism {stage.tp} of {heads} key and value heads",
                hint=f"give it a tp that divides {heads}",
            )
        if least < stage.tp:
            raise PlanError(f"stage {number} asks for tensor parallelism {stage.tp} of width {least}")
        if stage.sp and stage.tp == 1:
            raise PlanError(
                f"stage {number} asks for sequence parallelism with tp 1",
                hint="it shares tokens among the ranks of tp: leave sp out",
            )
        if stage.sp and plan.sequence_length % stage.tp:
            raise PlanError(
                f"stage {number} asks for sequence parallelism {stage.tp} of {plan.sequence_length} tokens",
                hint="leave sp out, or choose a sequence_length that tp divides",
            )
