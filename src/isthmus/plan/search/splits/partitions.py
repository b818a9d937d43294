"""Partitions of node groups: all set partitions for few, nested clusterings by link speed for many."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

Partition = tuple[tuple[int, ...], ...]
"""Groups of ascending indices; every index is in exactly one group."""


def all_partitions(count: int) -> Iterator[Partition]:
    """Yield every partition of `range(count)`, the single group first (Bell numbers: 1, 2, 5, ...)."""
    if count == 0:
        yield ()
        return
    for smaller in all_partitions(count - 1):
        for index, group in enumerate(smaller):
            yield (*smaller[:index], (*group, count - 1), *smaller[index + 1 :])
        yield (*smaller, (count - 1,))


def nested_partitions(count: int, rate: Callable[[int, int], float]) -> tuple[Partition, ...]:
    """Return the partitions of single-linkage clustering, all indices alone first; at most `count`.

    `rate(i, j)` is the link speed between indices `i` and `j` (0: not linked).
    """
    group_of = [[place] for place in range(count)]
    pairs = sorted((-rate(i, j), i, j) for i in range(count) for j in range(i + 1, count))
    found = [_ordered(group_of)]
    num_groups, last = count, -math.inf
    for slowness, i, j in pairs:
        if slowness >= 0 or num_groups == 1:
            break
        a, b = group_of[i], group_of[j]
        if a is b:
            continue
        if num_groups < count and slowness > last:
            found.append(_ordered(group_of))
        a += b
        for place in b:
            group_of[place] = a
        num_groups, last = num_groups - 1, slowness
    found.append(_ordered(group_of))
    return tuple(dict.fromkeys(found))


def _ordered(group_of: Sequence[list[int]]) -> Partition:
    """Return the groups of all indices, each in ascending order, by their first index."""
    return tuple(tuple(sorted(group)) for group in {id(group): group for group in group_of}.values())
