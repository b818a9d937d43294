"""`search_schedule`: the schedule that ends earliest on a given pipeline, within each stage's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.schedule.add_communication import require_counts
from isthmus.schedule.interleaved import interleaved
from isthmus.schedule.operation import Schedule
from isthmus.schedule.overlapped import warm_up_counts
from isthmus.schedule.searched.beam_search import beam_search
from isthmus.schedule.searched.compute_orders import (
    BACKWARD,
    FORWARD,
    ComputeOrders,
    Step,
    orders_of,
    peaks_of,
    split_backwards,
    time_orders,
)
from isthmus.schedule.searched.improve_policy import improve_policy
from isthmus.schedule.searched.lower_bound import LowerBound
from isthmus.schedule.searched.order_text import schedule_of_orders
from isthmus.schedule.searched.pipeline_costs import PipelineCosts
from isthmus.schedule.zero_bubble import zero_bubble

MAX_EXACT_STEPS = 96
"""Most computations of a step for which active schedules are enumerated: 4 stages of 8 micro-batches."""

MAX_STATES = 400
"""States of equally many computations that the enumeration keeps."""

MAX_GREEDY_STEPS = 70_000
"""Computations placed by all greedy schedules of a search together: less than a CPU second."""

MAX_PASSES = 400
"""Most greedy schedules of a search."""


@dataclass(frozen=True, kw_only=True)
class SearchedSchedule:
    """The result of a search."""

    schedule: Schedule
    orders: ComputeOrders
    step_s: float
    """Seconds of a step with it, tails included."""
    bound_s: float
    """No schedule with as many chunks is faster within the memory."""

    @property
    def is_optimal(self) -> bool:
        """Whether the search proved that no schedule with as many chunks is faster."""
        return self.step_s <= self.bound_s * (1 + 1e-9)


def search_schedule(
    costs: PipelineCosts, num_micro_batches: int, num_chunks: int = 1, *, max_states: int = MAX_STATES
) -> SearchedSchedule:
    """Return the fastest schedule found; the same arguments give the same schedule.

    Starts from the named schedules that fit, with backwards split where a stage can, improves greedy schedules, and
    enumerates active schedules where a step has at most `MAX_EXACT_STEPS` computations and a stage one chunk, keeping
    `max_states` of equally many computations (0: enumerates none). Messages leave as soon as they are computed. Source:
    CrossPipe, arXiv 2507.00217, which solves small pipelines exactly and large ones greedily. Raises `PlanError` for a
    count below 1.
    """
    require_counts(costs.num_stages, num_micro_batches, num_chunks)
    bound_s = LowerBound(costs, num_micro_batches, num_chunks).of_step_s()
    steps = 3 * costs.num_stages * num_micro_batches * num_chunks
    passes = max(1, min(MAX_PASSES, MAX_GREEDY_STEPS // steps))
    best, best_s = improve_policy(costs, num_micro_batches, num_chunks, passes, bound_s)
    for orders in _named_orders(costs, num_micro_batches, num_chunks):
        step_s = time_orders(orders, costs, num_chunks)
        if step_s < best_s:
            best, best_s = orders, step_s
    if num_chunks == 1 and steps <= MAX_EXACT_STEPS and max_states:
        found = beam_search(costs, num_micro_batches, best_s, max_states)
        best, best_s, bound_s = found.orders or best, found.step_s, max(bound_s, found.bound_s)
    return SearchedSchedule(
        schedule=schedule_of_orders(best, num_micro_batches, num_chunks), orders=best, step_s=best_s,
        bound_s=min(bound_s, best_s),
    )  # fmt: skip


def _named_orders(costs: PipelineCosts, num_micro_batches: int, num_chunks: int) -> Iterator[ComputeOrders]:
    """Yield the orders of the named schedules within the memory, with and without split backwards."""
    room = [one.max_in_flight * num_chunks for one in costs.stages]
    for orders in _all_named_orders(costs, num_micro_batches, num_chunks):
        if all(peak <= most for peak, most in zip(peaks_of(orders), room, strict=True)):
            yield orders
            yield split_backwards(orders, costs)


def _all_named_orders(costs: PipelineCosts, num_micro_batches: int, num_chunks: int) -> Iterator[ComputeOrders]:
    count = costs.num_stages
    if num_chunks > 1:
        yield orders_of(interleaved(count, num_micro_batches, num_chunks))
        return
    if all(one.splits_backward for one in costs.stages):
        yield orders_of(zero_bubble(count, num_micro_batches))
    hops_s = [(costs.hop(s, s + 1).total_s + costs.hop(s + 1, s).total_s) / 2 for s in range(count - 1)]
    limits = [min(one.max_in_flight, num_micro_batches) for one in costs.stages]
    pass_s = [one.pass_s for one in costs.stages]
    depths = {tuple(min(count - s - 1, num_micro_batches) for s in range(count))}  # that of 1F1B
    for bound in sorted({min(limits), max(limits), *_powers(max(limits))}):
        depths.add(warm_up_counts(pass_s, hops_s, num_micro_batches, [min(bound, limit) for limit in limits]))
    for depth in sorted(depths):
        yield tuple(_warm_up_order(warm_up, num_micro_batches) for warm_up in depth)


def _warm_up_order(warm_up: int, num_micro_batches: int) -> tuple[Step, ...]:
    """Return the order of 1F1B, and of `overlapped`, at a stage that begins with `warm_up` forwards."""
    forward, backward = (FORWARD, 0), (BACKWARD, 0)
    return (forward,) * warm_up + (forward, backward) * (num_micro_batches - warm_up) + (backward,) * warm_up


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(int(math.log2(most)) + 1)]
