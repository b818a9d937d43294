"""`runner_ups`: the compositions of replica groups in the order of their times, without what only a layout knows.

All others than the best one are divided by its members: those without its first member, those with it and without its
second, and so on. Source: E. Lawler, "A procedure for computing the K best solutions to discrete optimization
problems", Management Science 18 (1972).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from operator import is_, is_not
from typing import TypeVar

OptionT = TypeVar("OptionT")
OptionsT = TypeVar("OptionsT")


def runner_ups(
    options: Sequence[OptionsT],
    compose: Callable[[Sequence[OptionsT]], tuple[float, tuple[OptionT, ...]] | float],
    narrow: Callable[[OptionsT, Callable[[OptionT], bool]], OptionsT],
) -> Iterator[tuple[float, tuple[OptionT, ...]]]:
    """Yield (seconds, option per replica group), those that finish first first, each once.

    `compose(options)` returns the best composition of some options per replica group, or a number if there is none;
    `narrow(options, keep)` the options of one group that `keep` accepts.
    """
    heap: list[tuple[float, int, tuple[OptionT, ...], Sequence[OptionsT]]] = []
    count = 0

    def push(some: Sequence[OptionsT]) -> None:
        nonlocal count
        found = compose(some)
        if not isinstance(found, float):
            heappush(heap, (found[0], count, found[1], some))
            count += 1

    push(options)
    while heap:
        time_s, _, chosen, some = heappop(heap)
        yield time_s, chosen
        fixed = list(some)
        for place, one in enumerate(chosen):
            push([*fixed[:place], narrow(fixed[place], partial(is_not, one)), *fixed[place + 1 :]])
            fixed[place] = narrow(fixed[place], partial(is_, one))
