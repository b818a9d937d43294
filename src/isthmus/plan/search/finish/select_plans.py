"""Select simulated plans by objective and limits, and explain limits that no plan meets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from isthmus.core.plan import Refusal
from isthmus.plan.search.costs.plan_value import PlanValue
from isthmus.plan.search.finish.write_plan import ScoredPlan

Objective = Literal["time", "cost", "energy", "pareto"]
"""What plans are sorted by; `pareto` returns those that no other dominates in time, cost and energy."""


def select_plans(
    scored: Sequence[ScoredPlan],
    objective: Objective,
    steps: int,
    deadline_s: float | None,
    budget: float | None,
    num_plans: int,
    value: PlanValue | None = None,
) -> list[ScoredPlan]:
    """Return at most `num_plans` plans by the objective, or by `value`, from `scored` sorted by time.

    `steps` of each take at most `deadline_s` and cost at most `budget` (None: unlimited). `pareto` returns
    the plans that no other dominates in time, cost and energy.
    """
    kept = [
        one
        for one in scored
        if (deadline_s is None or steps * one.time_s <= deadline_s) and (budget is None or steps * one.cost <= budget)
    ]
    if value is not None:
        kept.sort(key=lambda one: (scored_value(one, value), one.time_s, one.plan.id))
    elif objective == "cost":
        kept.sort(key=lambda one: (one.cost, one.time_s, one.plan.id))
    elif objective == "energy":
        kept.sort(key=lambda one: (one.energy_j, one.time_s, one.plan.id))
    elif objective == "pareto":
        kept = [one for one in kept if not any(_dominates(other, one) for other in kept)]
    return _diversify(kept, num_plans)


def scored_value(one: ScoredPlan, value: PlanValue) -> float:
    """Return the value of a simulated plan."""
    return value.of(one.time_s, one.cost, one.energy_j)


def _diversify(ordered: Sequence[ScoredPlan], num_plans: int) -> list[ScoredPlan]:
    """Return `num_plans` plans in the same order, preferring the best of each set of clusters and local steps."""
    first: dict[tuple[tuple[str, ...], int], ScoredPlan] = {}
    for one in ordered:
        first.setdefault((one.layout.clusters, one.layout.local_steps), one)
    best = {id(one) for one in first.values()}
    others = [one for one in ordered if id(one) not in best]
    wanted = {one.plan.id for one in [*first.values(), *others][:num_plans]}
    return [one for one in ordered if one.plan.id in wanted]


def _dominates(one: ScoredPlan, other: ScoredPlan) -> bool:
    mine, others = (one.time_s, one.cost, one.energy_j), (other.time_s, other.cost, other.energy_j)
    return all(a <= b for a, b in zip(mine, others, strict=True)) and mine != others


def explain_unmet_limits(scored: Sequence[ScoredPlan], steps: int) -> Refusal:
    """Return a refusal that states the nearest feasible values, if no plan meets deadline and budget."""
    fastest, cheapest = scored[0], min(scored, key=lambda one: one.cost)
    reason = (
        f"no plan meets deadline and budget: the fastest takes {steps * fastest.time_s:.0f} s for {steps} "
        f"steps, the cheapest costs {steps * cheapest.cost:.2f}"
    )
    return Refusal(clusters=fastest.layout.clusters, reason=reason)
