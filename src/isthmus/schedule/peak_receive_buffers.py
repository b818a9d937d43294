"""`peak_receive_buffers`: the peak number of receive buffers of each stage of a schedule."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.schedule.operation import Operation, Schedule


def peak_receive_buffers(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of received tensors that each stage holds at one time, (num_stages,).

    A buffer is held from the start of its receive to its last use: the backward of its micro-batch
    (`backward_weight` if the backward is split, the forward in a forward-only schedule). In a schedule by
    `add_communication` without split backwards, a stage with `n` peers holds at most its micro-batches in flight
    + 1 + `n * receive_ahead` buffers.
    """
    return tuple(_peak_held(operations, schedule.trains) for operations in schedule.stages)


def is_last_use(operation: Operation, trains: bool) -> bool:
    """Return whether `operation` is the last to use the tensors received for its micro-batch and chunk."""
    return operation.kind in (("backward", "backward_weight") if trains else ("forward",))


def _peak_held(operations: Iterable[Operation], trains: bool) -> int:
    by_micro_batch: dict[tuple[int, int], int] = {}
    held = most = 0
    for one in operations:
        key = one.micro_batch, one.chunk
        if one.kind.startswith("receive_"):
            by_micro_batch[key] = by_micro_batch.get(key, 0) + 1
            held += 1
            most = max(most, held)
        elif is_last_use(one, trains):
            held -= by_micro_batch.pop(key, 0)
    return most
