"""`zero_bubble`: 1F1B with the weight gradients put where stages would wait."""

from __future__ import annotations

from isthmus.schedule.exchanges import lay_exchanges, require_counts
from isthmus.schedule.operation import Operation, Schedule


def zero_bubble(num_stages: int, num_micro_batches: int, receive_ahead: int = 1) -> Schedule:
    """The order of 1F1B, with every backward cut in two; no stage holds more than 1F1B's first stage does.

    Stage `s` keeps `s` weight gradients back: later stages send the first gradients sooner, and fill their
    end with what they kept. Exchanges overlap computing. Source: P. Qi et al., "Zero Bubble Pipeline
    Parallelism", ICLR 2024, schedule ZB-H1.
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
