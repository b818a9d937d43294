"""`ComputeOrders`: the order of computations of every stage, and `time_orders`, the seconds of a step with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.core.errors import PlanError
from isthmus.schedule.operation import Operation, OperationKind, Schedule
from isthmus.schedule.searched.pipeline_costs import PipelineCosts

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, BACKWARD = range(4)
"""Codes of computations."""

KINDS: tuple[OperationKind, ...] = ("forward", "backward_input", "backward_weight", "backward")

Step = tuple[int, int]
"""(code, chunk): the next computation of that kind of the chunk. Micro-batches keep their order."""

ComputeOrders = tuple[tuple[Step, ...], ...]
"""The computations of every stage, in order, (num_stages, ...)."""


def orders_of(schedule: Schedule) -> ComputeOrders:
    """Return the order of computations of `schedule`, whose micro-batches must keep their order in each chunk."""
    return tuple(
        tuple((KINDS.index(one.kind), one.chunk) for one in operations if one.kind in KINDS)
        for operations in schedule.stages
    )


def operations_of(order: Iterable[Step]) -> tuple[Operation, ...]:
    """Return the operations of a stage's order: the k-th step of a kind and chunk is micro-batch k."""
    counts: dict[Step, int] = {}
    operations = []
    for step in order:
        number = counts.get(step, 0)
        counts[step] = number + 1
        operations.append(Operation(KINDS[step[0]], number, step[1]))
    return tuple(operations)


def split_backwards(orders: ComputeOrders, costs: PipelineCosts) -> ComputeOrders:
    """Return `orders` with each whole backward split in place, at stages that can: the gradient leaves earlier."""
    split = ((BACKWARD_INPUT, BACKWARD_WEIGHT), (BACKWARD,))
    return tuple(
        tuple(
            (code, step[1])
            for step in order
            for code in (split[not stage.splits_backward] if step[0] == BACKWARD else (step[0],))
        )
        for stage, order in zip(costs.stages, orders, strict=True)
    )


def peaks_of(orders: ComputeOrders) -> tuple[int, ...]:
    """Return the most micro-batches of a chunk in flight at each stage, all chunks together, (num_stages,)."""
    peaks = []
    for order in orders:
        now = peak = 0
        for code, _ in order:
            now += (code == FORWARD) - (code in (BACKWARD, BACKWARD_WEIGHT))
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)


def step_durations(costs: PipelineCosts, num_chunks: int) -> list[tuple[float, float, float, float]]:
    """Return the seconds of a forward, input gradient, weight gradient and whole backward of a chunk, by stage."""
    return [
        (
            one.forward_s / num_chunks,
            one.backward_input_s / num_chunks,
            one.backward_weight_s / num_chunks,
            (one.backward_input_s + one.backward_weight_s) / num_chunks,
        )
        for one in costs.stages
    ]


def time_orders(orders: Sequence[Sequence[Step]], costs: PipelineCosts, num_chunks: int = 1) -> float:
    """Return the seconds of a step, tails included, whose stages compute in these orders.

    Messages leave as soon as they are computed. Raises `PlanError` for orders that wait for each other.
    """
    num_stages = costs.num_stages
    last = num_stages * num_chunks - 1
    durations = step_durations(costs, num_chunks)
    clocks, places = [0.0] * num_stages, [0] * num_stages
    link_free: dict[tuple[int, int], float] = {}
    forwards: list[list[float]] = [[] for _ in range(last + 1)]
    gradients: list[list[float]] = [[] for _ in range(last + 1)]
    done = [[0, 0] for _ in range(last + 1)]
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            clock_s, place, own = clocks[stage], places[stage], durations[stage]
            while place < len(order):
                code, chunk = order[place]
                virtual = chunk * num_stages + stage
                if code == FORWARD:
                    if virtual:
                        arrivals, number = forwards[virtual], done[virtual][0]
                        if number == len(arrivals):
                            break
                        clock_s = max(clock_s, arrivals[number])
                    done[virtual][0] += 1
                    clock_s += own[FORWARD]
                    target = virtual + 1
                elif code == BACKWARD_WEIGHT:
                    clock_s += own[BACKWARD_WEIGHT]
                    target = -1
                else:
                    if virtual < last:
                        arrivals, number = gradients[virtual], done[virtual][1]
                        if number == len(arrivals):
                            break
                        clock_s = max(clock_s, arrivals[number])
                    done[virtual][1] += 1
                    clock_s += own[code]
                    target = virtual - 1
                if 0 <= target <= last:
                    ends = stage, target % num_stages
                    hop = costs.hop(*ends)
                    left_s = max(clock_s, link_free.get(ends, 0.0)) + hop.transfer_s
                    link_free[ends] = left_s
                    (forwards if code == FORWARD else gradients)[target].append(left_s + hop.delay_s)
                place += 1
                moved = True
            clocks[stage], places[stage] = clock_s, place
    if stuck := [stage for stage, order in enumerate(orders) if places[stage] < len(order)]:
        raise PlanError(f"stages {stuck} wait for each other", hint="`check_schedule` names the operations")
    return max(clock_s + one.tail_s for clock_s, one in zip(clocks, costs.stages, strict=True))
