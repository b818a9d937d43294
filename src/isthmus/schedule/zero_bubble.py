"""`zero_bubble`: 1F1B with weight gradients computed where stages would otherwise be idle."""

from __future__ import annotations

from isthmus.schedule.add_communication import add_communication, require_counts
from isthmus.schedule.operation import Operation, Schedule


def zero_bubble(num_stages: int, num_micro_batches: int, receive_ahead: int = 1) -> Schedule:
    """Return schedule ZB-H1: 1F1B with split backwards, at the peak memory of 1F1B's first stage.

    Stage `s` defers `s` weight gradients: later stages send the first input gradients sooner and fill their
    idle time at the end with the deferred ones. Communication overlaps computation. Source: P. Qi et al.,
    "Zero Bubble Pipeline Parallelism", ICLR 2024.
    """
    require_counts(num_stages, num_micro_batches)
    stages = tuple(_stage_order(s, num_stages, num_micro_batches) for s in range(num_stages))
    return add_communication(Schedule("zero_bubble", num_micro_batches, stages), receive_ahead)


def _stage_order(stage: int, num_stages: int, num_micro_batches: int) -> tuple[Operation, ...]:
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    order = [Operation("forward", m) for m in range(warm_up)]
    done = 0
    for i in range(num_micro_batches):
        if warm_up + i < num_micro_batches:
            order.append(Operation("forward", warm_up + i))
        order.append(Operation("backward_input", i))
        if i - done >= stage:
            order.append(Operation("backward_weight", done))
            done += 1
    return (*order, *(Operation("backward_weight", m) for m in range(done, num_micro_batches)))
