"""The steps of one aggregator: workers send to it, it adds, and the total returns to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.strategies.step import Step
from isthmus.strategies.worker_grid import Range


def push(workers: Sequence[int], aggregator: int, elements: Range, round_number: int = 0) -> list[Step]:
    """Return the steps by which `workers` send their values to `aggregator`, which adds them."""
    return [Step(round_number, worker, aggregator, *elements, adds=True) for worker in workers]


def multicast(workers: Sequence[int], aggregator: int, elements: Range, round_number: int = 0) -> list[Step]:
    """Return the steps by which `aggregator` sends the total to `workers`."""
    return [Step(round_number, aggregator, worker, *elements, adds=False) for worker in workers]


def windows(elements: Range, window_elements: int | None) -> Iterator[tuple[int, Range]]:
    """Yield number and range of each window of a pool of slots: all elements if `window_elements` is None."""
    start, stop = elements
    size = window_elements or max(stop - start, 1)
    for number, first in enumerate(range(start, stop, size)):
        yield number, (first, min(first + size, stop))


def stream_through(workers: Sequence[int], aggregator: int, elements: Range, window_elements: int | None) -> list[Step]:
    """Return the steps of a switch: each window is pushed, then multicast, which frees its slots for the next.

    A worker sends to a slot again when it has received the slot's result (algorithm 3 of the PASSING paper).
    """
    return [
        step
        for number, window in windows(elements, window_elements)
        for step in (
            *push(workers, aggregator, window, 2 * number),
            *multicast(workers, aggregator, window, 2 * number + 1),
        )
    ]
