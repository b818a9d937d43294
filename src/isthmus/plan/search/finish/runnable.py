"""`why_not_runnable`: whether our own runtime executes a plan, decided from the plan alone."""

from __future__ import annotations

from isthmus.core.plan import Plan

RUN_SCHEDULES = ("1f1b", "dualpipe", "gpipe", "interleaved", "overlapped", "zero_bubble")
"""Schedules that the runtime executes."""


def why_not_runnable(plan: Plan) -> str | None:
    """Return what our runtime lacks for `plan`, or None where it executes it.

    The runtime checks more when a job starts: that plan and job agree, that the model is one it trains.
    """
    if plan.local_steps > 1:
        return f"{plan.local_steps} local steps between averages: the runtime reduces gradients every step"
    if plan.zero > 1:
        return f"ZeRO stage {plan.zero}: the runtime deals out the optimizer's state alone, stage 1"
    if plan.overlap_gradients:
        return "gradients reduced during the backward: the runtime reduces them after it"
    for name in ("cp", "ep"):
        most = max(getattr(stage, name) for stage in plan.stages)
        if most > 1:
            return f"{name} {most}: the runtime shares a stage among chips by tp alone"
    if plan.schedule not in RUN_SCHEDULES:
        return f"schedule {plan.schedule}: the runtime has {', '.join(RUN_SCHEDULES)}"
    return None
