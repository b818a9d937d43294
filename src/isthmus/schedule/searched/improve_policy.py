"""`improve_policy`: the best of many greedy schedules: a table of policies, then single steps away from the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from isthmus.schedule.searched.compute_orders import ComputeOrders, time_orders
from isthmus.schedule.searched.list_schedule import ListPolicy, list_schedule
from isthmus.schedule.searched.pipeline_costs import PipelineCosts

_IDLE_SHARES = (0.0, 0.5, 1.0, 0.25, 0.75)
_SLACK = 1 - 1e-9


def improve_policy(
    costs: PipelineCosts, num_micro_batches: int, num_chunks: int, max_passes: int, bound_s: float
) -> tuple[ComputeOrders, float]:
    """Return the best orders of at most `max_passes` greedy schedules, and the seconds of their step.

    Ends early at `bound_s`, below which no schedule is. The result is a function of the arguments.
    """
    best: tuple[float, ComputeOrders, ListPolicy] | None = None
    tried: set[ListPolicy] = set()

    def attempt(policy: ListPolicy) -> bool:
        """Make a schedule; return whether it is the best so far."""
        nonlocal best
        tried.add(policy)
        orders, _ = list_schedule(costs, num_micro_batches, num_chunks, policy)
        step_s = time_orders(orders, costs, num_chunks)
        if best is None or step_s < best[0] * _SLACK:
            best = step_s, orders, policy
            return True
        return False

    def is_over() -> bool:
        return best is not None and (len(tried) >= max_passes or best[0] * _SLACK <= bound_s)

    for policy in _first_policies(costs, num_micro_batches, num_chunks):
        if is_over():
            break
        if policy not in tried:
            attempt(policy)
    improved = True
    while improved and best is not None:
        improved = False
        for policy in _neighbours(best[2], costs, num_micro_batches, num_chunks):
            if is_over():
                break
            if policy not in tried and attempt(policy):
                improved = True
                break
    if best is None:
        raise ValueError("max_passes must be at least 1")
    return best[1], best[0]


def _first_policies(costs: PipelineCosts, num_micro_batches: int, num_chunks: int) -> Iterator[ListPolicy]:
    """Yield policies with leads of all memory, and of 1 to 4 forwards per later stage, as in 1F1B and deeper."""
    full = _full_leads(costs, num_micro_batches, num_chunks)
    after = range(costs.num_stages - 1, -1, -1)
    depths = [full, *(tuple(min(most, k * n + 1) for most, n in zip(full, after, strict=True)) for k in (1, 2, 3, 4))]
    for idle_share in _IDLE_SHARES:
        for lead in depths:
            for forward_first in (False, True):
                yield ListPolicy(lead=lead, forward_first=forward_first, idle_share=idle_share)


def _neighbours(
    policy: ListPolicy, costs: PipelineCosts, num_micro_batches: int, num_chunks: int
) -> Iterator[ListPolicy]:
    """Yield policies in which one stage's lead differs by one, and those with another share of idling."""
    full = _full_leads(costs, num_micro_batches, num_chunks)
    for stage, (lead, most) in enumerate(zip(policy.lead, full, strict=True)):
        for changed in (lead - 1, lead + 1):
            if 1 <= changed <= most:
                yield replace(policy, lead=(*policy.lead[:stage], changed, *policy.lead[stage + 1 :]))
    for idle_share in _IDLE_SHARES:
        yield replace(policy, idle_share=idle_share)
    yield replace(policy, forward_first=not policy.forward_first)


def _full_leads(costs: PipelineCosts, num_micro_batches: int, num_chunks: int) -> tuple[int, ...]:
    return tuple(min(one.max_in_flight, num_micro_batches) * num_chunks for one in costs.stages)
