"""`range_times`: the seconds of a stage by the range of layers that it takes, for models of unlike layers.

Most ranges repeat: layers alternate, or only the first few differ. Those of the same layers in the same order
are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.plan.search.splits.split_equal_layers import LayerTimes
from isthmus.plan.search.splits.split_layers import Lines

Row = Callable[[int, Iterable[int]], Iterable[float]]
"""The seconds of layers `[first, last)` for rising lasts, as long as they fit."""


@dataclass(frozen=True, eq=False)
class RangeTimes:
    """Seconds of a stage in one place. `rows` has them by first layer and rising last, as long as they fit.

    `start[first]` is the layer whose row serves for `first`. The last stage has one entry in each row.
    """

    rows: dict[int, list[float]]
    start: Sequence[int]
    is_last: bool

    @cached_property
    def lines(self) -> Lines:
        """What there is by first layer."""
        count = len(self.start)
        if self.is_last:
            return [[(count, one) for one in self.rows.get(first, ())] for first in range(count)]
        found = []
        for first in range(count):
            row = self.rows.get(self.start[first], [])
            found.append([(first + n, one) for n, one in enumerate(row[: count - 1 - first], 1)])
        return found

    @cached_property
    def least(self) -> LayerTimes:
        """The least seconds of so many layers, whichever they are."""
        count = len(self.start)
        if self.is_last:
            each = [self.rows.get(count - n) for n in range(1, count + 1)]
            if 0 in self.rows:  # a single stage takes all layers
                each = [self.rows[0]] * count
            return LayerTimes(tuple(one[0] for one in each if one))
        most = max((len(row) for row in self.rows.values()), default=0)
        return LayerTimes(
            tuple(min(row[n] for row in self.rows.values() if len(row) > n) for n in range(most))
        )


def range_times(row: Row, start: Sequence[int], is_first: bool, is_last: bool) -> RangeTimes:
    """Return the seconds of a stage in its place by the layers it takes.

    `start[first]` is the first layer, from 1 on, after which the same layers follow as after `first`.
    """
    count = len(start)
    firsts = [0] if is_first else range(1, count)
    rows = {}
    for first in firsts:
        if is_first or is_last or start[first] == first:
            rows[first] = list(row(first, [count] if is_last else range(first + 1, count)))
    return RangeTimes(rows, [0] + [count] * (count - 1) if is_first else start, is_last)
