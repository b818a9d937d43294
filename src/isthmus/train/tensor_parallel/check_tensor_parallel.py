"""`check_tensor_parallel`: reject stages whose tensors cannot be sharded over their tensor-parallel ranks."""

from __future__ import annotations

from isthmus.core.errors import PlanError
from isthmus.core.model import Model
from isthmus.core.plan import Plan

_SHARDED_WIDTHS = ("vocab_size", "intermediate_size", "moe_intermediate_size")


def check_tensor_parallel(plan: Plan, model: Model) -> None:
    """Raise `PlanError` unless each stage's heads, widths and tokens can be sharded over its `tp` ranks.

    Each KV head stays on one rank with its query heads: replicated KV heads would need gradient reductions.
    """
    heads = model.num_kv_heads
    least = min(int(model.config.get(name) or model.hidden_size) for name in _SHARDED_WIDTHS)
    for number, stage in enumerate(plan.stages):
        if heads % stage.tp:
            raise PlanError(
                f"stage {number} has tp {stage.tp}, which does not divide the model's {heads} KV heads",
                hint=f"choose a tp that divides {heads}",
            )
        if least < stage.tp:
            raise PlanError(f"stage {number} has tp {stage.tp}, more than the model's smallest width {least}")
        if stage.sp and stage.tp == 1:
            raise PlanError(
                f"stage {number} has sequence parallelism but tp 1",
                hint="sequence parallelism needs tp > 1: remove sp",
            )
        if stage.sp and plan.sequence_length // stage.cp % stage.tp:
            raise PlanError(
                f"stage {number} has sequence parallelism over tp {stage.tp}, "
                f"which does not divide {plan.sequence_length // stage.cp} tokens",
                hint="remove sp, or choose a sequence_length that tp divides",
            )
