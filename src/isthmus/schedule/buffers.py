"""`receive_buffers`: how many receive buffers each stage of a schedule needs at its fullest."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.schedule.operation import Operation, Schedule


def receive_buffers(schedule: Schedule) -> tuple[int, ...]:
    """Return by stage the largest number of received tensors that are held at one time.

    A buffer is held from the start of its receive until it was used for the last time: what a forward works
    on until its backward (its `backward_weight` where that is cut in two; the forward itself where nothing
    trains), a gradient until the same backward. Where `lay_exchanges` made the schedule and no backward is
    cut in two, a stage that hears from `n` peers holds at most one more than its micro-batches in flight, and
    `receive_ahead` for each peer.
    """
    return tuple(_most(operations, schedule.trains) for operations in schedule.stages)


def is_last_use(operation: Operation, trains: bool) -> bool:
    """Tell whether after `operation` nothing received for its micro-batch and chunk is used any more."""
    return operation.kind in (("backward", "backward_weight") if trains else ("forward",))


def _most(operations: Iterable[Operation], trains: bool) -> int:
    held: dict[tuple[int, int], int] = {}
    now = most = 0
    for one in operations:
        key = one.micro_batch, one.chunk
        if one.kind.startswith("receive_"):
            held[key] = held.get(key, 0) + 1
            now += 1
            most = max(most, now)
        elif is_last_use(one, trains):
            now -= held.pop(key, 0)
    return most
