"""`range_times`: a stage's seconds by its range of layers, for models with unequal layers.

Most ranges repeat, since layers alternate or only the first few differ: ranges with the same layers in the
same order are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.plan.search.splits.split_equal_layers import LayerTimes
from isthmus.plan.search.splits.split_layers import RangeTable

RowSeconds = Callable[[int, Iterable[int]], Iterable[float]]
"""(first, lasts) -> seconds of layers `[first, last)` for ascending lasts, as far as they fit in memory."""


@dataclass(frozen=True, eq=False)
class RangeTimes:
    """Seconds of a stage in one place of the pipeline."""

    # By first layer: seconds for ascending last, as far as they fit; the last stage has one entry each.
    rows: dict[int, list[float]]
    # `equal_suffix_start[first]`: the first layer whose row also serves `first`, shape [num_layers].
    equal_suffix_start: Sequence[int]
    is_last: bool

    @cached_property
    def by_first_layer(self) -> RangeTable:
        """(last, seconds) by first layer."""
        count = len(self.equal_suffix_start)
        if self.is_last:
            return [[(count, one) for one in self.rows.get(first, ())] for first in range(count)]
        found = []
        for first in range(count):
            row = self.rows.get(self.equal_suffix_start[first], [])
            found.append([(first + n, one) for n, one in enumerate(row[: count - 1 - first], 1)])
        return found

    @cached_property
    def least_times(self) -> LayerTimes:
        """Least seconds of any `n` consecutive layers, by `n`."""
        count = len(self.equal_suffix_start)
        if self.is_last:
            each = [self.rows.get(count - n) for n in range(1, count + 1)]
            if 0 in self.rows:  # a single stage holds all layers
                each = [self.rows[0]] * count
            return LayerTimes(tuple(one[0] for one in each if one))
        most = max((len(row) for row in self.rows.values()), default=0)
        return LayerTimes(tuple(min(row[n] for row in self.rows.values() if len(row) > n) for n in range(most)))


def range_times(
    row_seconds: RowSeconds, equal_suffix_start: Sequence[int], is_first: bool, is_last: bool
) -> RangeTimes:
    """Return the seconds of a stage in its place by range of layers.

    `equal_suffix_start[first]` is the first layer, from 1 on, that is followed by the same layers as `first`.
    """
    count = len(equal_suffix_start)
    firsts = [0] if is_first else range(1, count)
    rows = {}
    for first in firsts:
        if is_first or is_last or equal_suffix_start[first] == first:
            rows[first] = list(row_seconds(first, [count] if is_last else range(first + 1, count)))
    return RangeTimes(rows, [0] + [count] * (count - 1) if is_first else equal_suffix_start, is_last)
