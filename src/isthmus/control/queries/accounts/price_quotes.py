"""`quote`: what a job will cost by a plan, by the prices of now on, and the plans that its `max_price` admits."""

from __future__ import annotations

from isthmus.control.accounting.book_usage import cost_millionths
from isthmus.control.state import allocations
from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.core.plan import Plan, PlanSet, Refusal
from isthmus.core.units import MILLIONTHS


def quote(state: PoolState, job: JobRecord, plan: Plan) -> int | None:
    """Return the predicted cost of a run by `plan` from now on, in millionths; None without a predicted time."""
    if plan.predicted is None or not state.meter.prices.schedules:
        return None
    run_ms = round(plan.predicted.iteration_s * job.spec.training.steps * 1000)
    now_ms, needs = state.meter.now_ms, allocations.needs_of_plan(state, job, plan)
    prices, job_class = state.meter.prices, job.priority
    return sum(
        cost_millionths(prices, one, job_class, amount, now_ms, now_ms + run_ms) for one, amount in needs.items()
    )


def affordable_plans(state: PoolState, job: JobRecord, plans: PlanSet) -> PlanSet:
    """Return the plans that are not predicted to cost more than the job may; the others are refused, with their cost.

    A job that has run keeps its plan: what it costs is watched as it runs.
    """
    limit = job.max_price_millionths
    if limit is None or job.has_run:
        return plans
    quotes = {plan.id: quote(state, job, plan) for plan in plans.plans}
    dear = [plan for plan in plans.plans if (quotes[plan.id] or 0) > limit]
    if not dear:
        return plans
    currency = state.meter.prices.currency
    cheapest = min(quotes[plan.id] or 0 for plan in dear)
    reason = (
        f"{len(dear)} plans are predicted to cost more than max_price {limit / MILLIONTHS:,.2f} {currency}, the "
        f"cheapest of them {cheapest / MILLIONTHS:,.2f}"
    )
    kept = tuple(plan for plan in plans.plans if plan not in dear)
    return PlanSet(plans=kept, refused=(*plans.refused, Refusal(clusters=(), reason=reason)))
