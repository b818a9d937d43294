"""`zero_bubble`: 1F1B with weight gradients computed where stages would otherwise be idle."""

from __future__ import annotations

from isthmus.schedule.exchanges import lay_exchanges, require_counts
from isthmus.schedule.operation import Operation, Schedule


def zero_bubble(num_stages: int, num_micro_batches: int, receive_ahead: int = 1) -> Schedule:
    """Return schedule ZB-H1: 1F1B with split backwards, at the peak memory of 1F1B's first stage.

    Stage `s` defers `s` weight gradients: later stages send the first input gradients sooner and fill their
    idle time at the end with the deferred ones. Communication overlaps computation. Source: P. Qi et al.,
    "Zero Bubble Pipeline Parallelism", ICLR 2024.
    """
    require_counts(num_stages, num_micro_batches)
    stages = tuple(_order(s, num_stages, num_micro_batches) for s in range(num_stages))
    return lay_exchanges(Schedule("zero_bubble", num_micro_batches, stages), receive_ahead)


def _order(stage: int, num_stages: int, total: int) -> tuple[Operation, ...]:
    warm_up = min(num_stages - stage - 1, total)
    order = [Operation("forward", m) for m in range(warm_up)]
    done = 0
    for i in range(total):
        if warm_up + i < total:
            order.append(Operation("forward", warm_up + i))
        order.append(Operation("backward_input", i))
        if i - done >= stage:
            order.append(Operation("backward_weight", done))
            done += 1
    return (*order, *(Operation("backward_weight", m) for m in range(done, total)))
