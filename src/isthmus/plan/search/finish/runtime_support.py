"""`runtime_incompatibility`: whether the Isthmus runtime supports a plan, decided from the plan alone."""

from __future__ import annotations

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.core.runs.plan_words import stated_words
from isthmus.core.runs.runnable.expert_groups import expert_groups
from isthmus.core.runs.runnable.sharding_problem import sharding_problem
from isthmus.core.stack import DEFAULT_STACK, find_stack

RUNTIME_SCHEDULES = ("1f1b", "dualpipe", "gpipe", "interleaved", "overlapped", "searched", "zero_bubble")
"""Schedules that the runtime supports."""


def runtime_incompatibility(plan: Plan) -> str | None:
    """Return why the Isthmus runtime cannot execute `plan`, or None if it can.

    At job start the runtime also checks that plan and job agree and that it can train the model.
    """
    stack = find_stack(plan.stack).name
    if stack != DEFAULT_STACK:
        return f"stack {stack}: a plan for another framework"
    for name in stated_words(plan):
        if name in ("cp_kind", "cp_rates") or (name == "sharding" and plan.zero > 1):
            continue
        return f"{name}: the runtime does only what its degrees, schedule and recomputation say"
    if (problem := sharding_problem(plan)) is not None:
        return f"{problem.message}: {problem.hint}"
    for stage in plan.stages:
        for name, degree in (("cp", stage.cp), ("ep", stage.ep)):
            if degree > 1 and stage.recompute == "selective":
                chosen = f"selective recomputation with {name} {degree}"
                return f"{chosen}: the runtime repeats whole layers or experts there"
    try:
        expert_groups(plan)
    except PlanError as error:
        return error.message
    if plan.schedule not in RUNTIME_SCHEDULES:
        return f"schedule {plan.schedule}: the runtime supports {', '.join(RUNTIME_SCHEDULES)}"
    if plan.schedule == "searched" and not plan.orders:
        return "schedule searched without orders: `isthmus simulate --schedule searched --save FILE` adds them"
    return None
