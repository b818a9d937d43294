"""Partitions of node groups: all set partitions for few, nested clusterings by link speed for many."""

from __future__ import annotations

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
    groups = [[place] for place in range(count)]
    pairs = sorted(
        ((rate(i, j), i, j) for i in range(count) for j in range(i + 1, count)), key=lambda p: (-p[0], p[1:])
    )
    found = [_ordered(groups)]
    last_rate = None
    for speed, i, j in pairs:
        if speed <= 0:
            break
        a = next(group for group in groups if i in group)
        b = next(group for group in groups if j in group)
        if a is b:
            continue
        if last_rate is not None and speed < last_rate:
            found.append(_ordered(groups))
        groups = [group for group in groups if group is not a and group is not b] + [a + b]
        last_rate = speed
    found.append(_ordered(groups))
    return tuple(dict.fromkeys(found))


def _ordered(replica_groups: Sequence[Sequence[int]]) -> Partition:
    return tuple(sorted(tuple(sorted(group)) for group in replica_groups))
