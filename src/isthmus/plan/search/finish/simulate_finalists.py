"""`simulate_finalists`: simulate the layouts with the best estimates, and refine the fastest ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from isthmus.core.errors import PlanError
from isthmus.core.job import Job
from isthmus.core.plan import Plan
from isthmus.core.pool import Pool
from isthmus.core.runs.runnable.expert_groups import expert_groups
from isthmus.plan.search.compose.best_layouts import LEAST_SIMULATED
from isthmus.plan.search.compose.plan_layout import PlanLayout
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.finish.fit_framework import fit_framework
from isthmus.plan.search.finish.refine_split import refine_split
from isthmus.plan.search.finish.score_plan import score_plan, search_orders
from isthmus.plan.search.finish.write_plan import ScoredPlan, write_plan
from isthmus.schedule import SEARCHED


@dataclass(frozen=True)
class SimulationEffort:
    """How much to simulate."""

    # Layouts kept by estimate, beside the best of each set of clusters.
    num_layouts: int
    # Budget of (stage, micro-batch) pairs to simulate.
    max_cells: int
    # Skip layouts whose estimate exceeds this multiple of the best simulated time.
    estimate_ratio: float
    # Plans to refine.
    num_refined: int
    # Further pairs for refinement, beside what is left of `max_cells`.
    refine_cells: int


LARGE_POOL_EFFORT, SMALL_POOL_EFFORT = (
    SimulationEffort(8, 2000, 1.1, 2, 2000),
    SimulationEffort(64, 8000, 1.25, 16, 5000),
)

SEARCHES_PER_PLAN = 2
"""Layouts per asked plan for which a schedule is searched."""


def simulate_finalists(
    layouts: Sequence[PlanLayout],
    job: Job,
    pool: Pool,
    workload: TrainingWorkload,
    effort: SimulationEffort,
    num_plans: int,
    *,
    limits: SearchLimits,
    value_of: Callable[[PlanLayout], float] = attrgetter("estimate_s"),
    scored_rank: Callable[[ScoredPlan], float] = attrgetter("time_s"),
) -> list[ScoredPlan]:
    """Write, simulate and refine the best layouts; return them by simulated time, or another value.

    `value_of` is what the search compared layouts by, `scored_rank` the same of a simulated plan.

    The result includes the best of up to `num_plans` sets of clusters. The effort covers these layouts only, so
    the result is independent of other searches.
    """

    def scored(planned: PlanLayout) -> ScoredPlan | None:
        layout = fit_framework(planned, limits.framework)
        if layout is None:
            return None
        plan = write_plan(layout, job, workload, executable=limits.executable)
        if limits.executable and not _has_expert_groups(plan):
            return None
        return ScoredPlan(layout, plan, score_plan(plan, pool, workload), pool)

    # Step 1: simulate layouts in the order of their estimates, within the budget.
    found: list[ScoredPlan] = []
    spent, known = 0, set[tuple[str, ...]]()
    for layout in sorted(layouts, key=lambda one: (value_of(one), one.num_chips)):
        best = min(map(scored_rank, found), default=math.inf)
        new = layout.clusters not in known and len(known) < num_plans
        poor = spent > effort.max_cells or value_of(layout) > effort.estimate_ratio * best
        if len(found) >= LEAST_SIMULATED and poor and not new:
            continue
        one = scored(layout)
        if one is None:
            continue
        found.append(one)
        spent += layout.simulation_cells
        known.add(layout.clusters)
    # Step 2: refine the fastest ones.
    found.sort(key=lambda one: (scored_rank(one), *time_order(one)))
    left = max(0, effort.max_cells - spent) + effort.refine_cells
    for place, first in enumerate(found[: effort.num_refined]):
        moves = left // effort.num_refined // first.layout.simulation_cells
        found[place] = refine_split(first, scored, moves, scored_rank)
    unique = {one.plan.id: one for one in found}
    if limits.schedule != SEARCHED:
        return list(unique.values())
    # Step 3: search a schedule for the fastest ones.
    fastest = sorted(unique.values(), key=lambda one: (scored_rank(one), *time_order(one)))
    return [_with_searched_schedule(one, pool, workload) for one in fastest[: SEARCHES_PER_PLAN * num_plans]]


def _has_expert_groups(plan: Plan) -> bool:
    """Return whether the runtime can deal out the experts of `plan`; a fixed ep may need more like replicas."""
    try:
        expert_groups(plan)
    except PlanError:
        return False
    return True


def _with_searched_schedule(scored: ScoredPlan, pool: Pool, workload: TrainingWorkload) -> ScoredPlan:
    """Return a plan with the schedule that was searched for its stages, of which it gets its id."""
    plan = search_orders(scored.plan, pool, workload)
    text = f"{plan.id}|{'|'.join(order for one in plan.orders for order in one.stages)}"
    plan = plan.model_copy(update={"id": "plan-" + hashlib.sha256(text.encode()).hexdigest()[:8]})
    return ScoredPlan(scored.layout, plan, score_plan(plan, pool, workload), pool)


def time_order(scored: ScoredPlan) -> tuple[float, int, str]:
    """Return the sort key of plans: simulated time, then chips."""
    return scored.time_s, scored.layout.num_chips, scored.plan.id
