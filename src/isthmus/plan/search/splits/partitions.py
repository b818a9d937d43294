"""Which node groups train together: set partitions for few, nested islands by link speed for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Partition = tuple[tuple[int, ...], ...]
"""Islands of places (indices), each in ascending order; every place is in exactly one island."""


def all_partitions(count: int) -> Iterator[Partition]:
    """Yield every partition of `range(count)`, one island first (Bell numbers: 1, 2, 5, 15, 52, ...)."""
    if count == 0:
        yield ()
        return
    for smaller in all_partitions(count - 1):
        for index, island in enumerate(smaller):
            yield (*smaller[:index], (*island, count - 1), *smaller[index + 1 :])
        yield (*smaller, (count - 1,))


def nested_partitions(count: int, rate: Callable[[int, int], float]) -> tuple[Partition, ...]:
    """Return the partitions that appear as islands are joined along ever slower links, all alone first.

    `rate(i, j)` is how fast places `i` and `j` are joined (0: not at all). At most `count` partitions: those
    of single-linkage clustering. The islands of equal chips of the largest pools are found in this way.
    """
    islands = [[place] for place in range(count)]
    pairs = sorted(
        ((rate(i, j), i, j) for i in range(count) for j in range(i + 1, count)), key=lambda p: (-p[0], p[1:])
    )
    found = [_ordered(islands)]
    last_rate = None
    for speed, i, j in pairs:
        if speed <= 0:
            break
        a = next(island for island in islands if i in island)
        b = next(island for island in islands if j in island)
        if a is b:
            continue
        if last_rate is not None and speed < last_rate:
            found.append(_ordered(islands))
        islands = [island for island in islands if island is not a and island is not b] + [a + b]
        last_rate = speed
    found.append(_ordered(islands))
    return tuple(dict.fromkeys(found))


def _ordered(islands: Sequence[Sequence[int]]) -> Partition:
    return tuple(sorted(tuple(sorted(island)) for island in islands))
