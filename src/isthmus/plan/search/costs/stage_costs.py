"""`Seat`: costs of a stage at a slot for fixed degrees and micro-batch size, tabulated by its layers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isthmus.plan.memory.stage_memory import Degrees
from isthmus.plan.search.costs.layer_ranges import RangeTimes, range_times
from isthmus.plan.search.costs.recomputation import fewest_recomputed
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_bytes import RESERVE, SeatBytes
from isthmus.plan.search.costs.task import Task, Zero
from isthmus.plan.search.splits.split_equal_layers import LayerTimes

MEMORY_FRACTION = 0.95
"""Share of a chip's memory that a stage may use."""


@dataclass(frozen=True)
class StageCut:
    """A stage of layers `[first, last)` with its times."""

    first: int
    last: int
    forward_s: float
    backward_s: float
    # Number of recomputed layers.
    recomputed: int

    @property
    def total_s(self) -> float:
        """Seconds of a micro-batch, both passes."""
        return self.forward_s + self.backward_s


FEW_REPLICAS = 16
"""Up to this many replicas memory tables are exact."""


def few(dp: int) -> int:
    """Round dp up to a power of two above `FEW_REPLICAS`, so that bounds need few memory tables.

    Safe for bounds: with more replicas the sharded optimizer takes no more memory per chip.
    """
    return dp if dp <= FEW_REPLICAS else 1 << (dp - 1).bit_length()


class Seat(SeatBytes):
    """Costs of stages on one kind of chip; slots of one kind share a table."""

    def __init__(self, task: Task, spot: Spot, degrees: Degrees, micro_batch_size: int) -> None:
        super().__init__(task, spot, degrees, micro_batch_size)
        self._tables: dict[tuple[bool, bool, int, int, int], LayerTimes] = {}
        self._same: dict[tuple[float, ...], LayerTimes] = {}
        self._ranges: dict[tuple[bool, bool, int, int, int], RangeTimes] = {}

    def cut(self, first: int, last: int, in_flight: int, dp: int, zero: Zero) -> StageCut | None:
        """Return the stage of layers `[first, last)`, recomputed as needed, or None if it does not fit.

        Algorithm 1 of the heterogeneous-training report.
        """
        limit = self.chip.memory_bytes * MEMORY_FRACTION
        count = last - first

        def needs(recomputed: int) -> float:
            return self.stage_bytes(first, last, in_flight, recomputed, dp, zero)

        recomputed = fewest_recomputed(count, needs, limit)
        if recomputed is None:
            return None
        return self.timed(first, last, recomputed)

    def timed(self, first: int, last: int, again: int) -> StageCut:
        """Return the stage of layers `[first, last)` with `again` of them recomputed, memory unchecked."""
        forward, backward, more = self._sums
        forward_s = forward[last] - forward[first]
        backward_s = backward[last] - backward[first] + more[first + again] - more[first]
        ends = ([self._ends[0]] if first == 0 else []) + (
            [self._ends[1]] if last == self.task.profile.num_layers else []
        )
        return StageCut(
            first, last, forward_s + sum(e[0] for e in ends), backward_s + sum(e[1] for e in ends), again
        )

    def table(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero) -> LayerTimes:
        """Return a stage's seconds by its number of equal layers.

        Equals `cut` for every number of layers, in closed form; equal tables are one object.
        """
        key = (is_first, is_last, in_flight, dp if zero else 1, zero)
        found = self._tables.get(key)
        if found is None:
            seconds = tuple(self._seconds(is_first, is_last, in_flight, dp, zero))
            found = self._tables[key] = self._same.setdefault(seconds, LayerTimes(seconds))
        return found

    def _room(
        self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero
    ) -> tuple[float, float, float]:
        """Return the bytes left for layers without and with recomputation, and the bytes of one layer."""
        dense, expert, kept, _ = self._held
        each, each_expert = self._static(dp, zero)
        layer_bytes = dense[1] * each + expert[1] * each_expert + in_flight * kept[1]
        limit = self.chip.memory_bytes * MEMORY_FRACTION / RESERVE
        plain, recomputed = self._rest[is_first, is_last, False], self._rest[is_first, is_last, True]
        return (
            limit - plain[0] * each - in_flight * plain[1] - plain[2],
            limit - recomputed[0] * each - in_flight * recomputed[1] - recomputed[2],
            layer_bytes,
        )

    def most_layers(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero) -> int:
        """Return how many equal layers fit if all may be recomputed."""
        plain, recomputed, layer_bytes = self._room(is_first, is_last, in_flight, dp, zero)
        least_bytes = layer_bytes - in_flight * self._held[3][1]
        return max(0, math.floor(plain / layer_bytes), math.floor(recomputed / least_bytes))

    def _seconds(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero) -> Iterator[float]:
        """Yield the seconds of 1, 2, ... equal layers as far as they fit."""
        plain, recomputing, layer_bytes = self._room(is_first, is_last, in_flight, dp, zero)
        saved = in_flight * self._held[3][1]
        layer_s, recompute_s = self._layers[0][0] + self._layers[0][1], self._layers[0][2]
        end_s = sum(self._ends[0]) * is_first + sum(self._ends[1]) * is_last
        layers = self.task.profile.num_layers
        easy = next((n for n in range(layers, 0, -1) if n * layer_bytes <= plain), 0)
        yield from (end_s + count * layer_s for count in range(1, easy + 1))
        for count in range(easy + 1, layers + 1):
            recomputed = (
                max(1, math.ceil((count * layer_bytes - recomputing) / saved - 1e-9)) if saved else count + 1
            )
            if recomputed > count:
                return
            yield end_s + count * layer_s + recomputed * recompute_s

    def ranges(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero) -> RangeTimes:
        """Return a stage's seconds by its range of unequal layers."""
        key = (is_first, is_last, in_flight, dp if zero else 1, zero)
        if key not in self._ranges:
            self._ranges[key] = range_times(
                lambda first, lasts: self.row(first, lasts, in_flight, dp, zero),
                self.task.start, is_first, is_last,
            )  # fmt: skip
        return self._ranges[key]

    def row(self, first: int, lasts: Iterable[int], in_flight: int, dp: int, zero: Zero) -> Iterator[float]:
        """Yield the seconds of stages of layers `[first, last)` for ascending `lasts`, as far as they fit.

        Equals `cut`, in closed form: the number of recomputed layers is found in prefix sums.
        """
        dense, expert, kept, saved = self._held
        forward, backward, more = self._sums
        each, each_expert = self._static(dp, zero)
        room = self.chip.memory_bytes * MEMORY_FRACTION / RESERVE - 1.0  # one byte for rounding
        for last in lasts:
            is_last = last == self.task.profile.num_layers
            plain, recomputed = (self._rest[first == 0, is_last, one] for one in (False, True))
            held = (dense[last] - dense[first]) * each + (expert[last] - expert[first]) * each_expert
            held += in_flight * (kept[last] - kept[first])
            seconds = forward[last] - forward[first] + backward[last] - backward[first]
            seconds += sum(self._ends[0]) * (first == 0) + sum(self._ends[1]) * is_last
            if held + plain[0] * each + in_flight * plain[1] + plain[2] > room:
                over = held + recomputed[0] * each + in_flight * recomputed[1] + recomputed[2] - room
                end = bisect_left(saved, saved[first] + over / in_flight, first + 1)
                if end > last:
                    return
                seconds += more[end] - more[first]
            yield seconds
