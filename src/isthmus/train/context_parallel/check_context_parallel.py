"""`check_context_parallel`: reject stages whose sequences or heads their context-parallel ranks cannot share."""

from __future__ import annotations

from isthmus.core.errors import PlanError
from isthmus.core.model import Model
from isthmus.core.plan import Plan
from isthmus.core.runs.check_plan import divisor_below
from isthmus.train.context_parallel.cp_process_group import stage_shares


def check_context_parallel(plan: Plan, model: Model) -> None:
    """Raise `PlanError` unless each stage's tokens, and its heads with `all_to_all`, can be shared over its `cp`."""
    heads = model.num_kv_heads
    for number, stage in enumerate(plan.stages):
        if stage.cp == 1:
            continue
        parts = stage.cp * (stage.tp if stage.sp else 1)
        if stage.cp_rates:
            stage_shares(plan, stage)
        elif plan.sequence_length % parts:
            shared = plan.sequence_length // (stage.tp if stage.sp else 1)
            raise PlanError(
                f"stage {number} has cp {stage.cp}, which does not divide {shared} tokens",
                hint=f"nearest valid: cp {divisor_below(shared, stage.cp)}",
            )
        if stage.cp_kind == "all_to_all" and heads % (stage.cp * stage.tp):
            raise PlanError(
                f"stage {number} has cp {stage.cp} of kind all_to_all and tp {stage.tp}, which do not divide the "
                f"model's {heads} KV heads",
                hint=f"nearest valid: cp {divisor_below(heads // stage.tp or 1, stage.cp)}, or cp_kind ring",
            )
        if stage.recompute == "selective":
            raise PlanError(
                f"stage {number} has cp {stage.cp} and selective recomputation, which would repeat its exchanges in "
                "part",
                hint="choose recompute full, moe or none",
            )
