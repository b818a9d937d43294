"""`StageCostTable`: costs of a stage at a slot for fixed degrees and micro-batch size, tabulated by its layers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.search.costs.layer_ranges import RangeTimes, range_times
from isthmus.plan.search.costs.recomputation import fewest_recomputed
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_bytes import StageBytes
from isthmus.plan.search.costs.workload import TrainingWorkload, ZeroStage
from isthmus.plan.search.splits.split_equal_layers import LayerTimes


@dataclass(frozen=True)
class TimedStage:
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


MAX_EXACT_REPLICAS = 16
"""Up to this many replicas memory tables are exact."""


def round_up_replicas(dp: int) -> int:
    """Round dp up to a power of two above `MAX_EXACT_REPLICAS`, so that bounds need few memory tables.

    Safe for bounds: with more replicas the sharded optimizer takes no more memory per chip.
    """
    return dp if dp <= MAX_EXACT_REPLICAS else 1 << (dp - 1).bit_length()


class StageCostTable(StageBytes):
    """Costs of stages on one kind of chip; slots of one kind share a table."""

    def __init__(
        self, workload: TrainingWorkload, slot: ChipSlot, degrees: StageDegrees, micro_batch_size: int
    ) -> None:
        super().__init__(workload, slot, degrees, micro_batch_size)
        self._layer_times: dict[tuple[bool, bool, int, int, int], LayerTimes] = {}
        self._max_layers: dict[tuple[bool, bool, int, int, int], int] = {}
        self._interned: dict[tuple[float, ...], LayerTimes] = {}
        self._range_times: dict[tuple[bool, bool, int, int, int], RangeTimes] = {}

    def fit_stage(self, first: int, last: int, in_flight: int, dp: int, zero: ZeroStage) -> TimedStage | None:
        """Return the stage of layers `[first, last)`, recomputed as needed, or None if it does not fit.

        Algorithm 1 of the heterogeneous-training report.
        """
        limit = self.memory_limit_bytes
        count = last - first

        def needs(recomputed: int) -> float:
            return self.stage_bytes(first, last, in_flight, recomputed, dp, zero)

        recomputed = fewest_recomputed(count, needs, limit)
        if recomputed is None:
            return None
        return self.time_stage(first, last, recomputed)

    def time_stage(self, first: int, last: int, recomputed: int) -> TimedStage:
        """Return the stage of layers `[first, last)` with `recomputed` of them recomputed, memory unchecked."""
        forward, backward, more = self._time_sums
        forward_s = forward[last] - forward[first]
        backward_s = backward[last] - backward[first] + more[first + recomputed] - more[first]
        ends = ([self._end_passes[0]] if first == 0 else []) + (
            [self._end_passes[1]] if last == self.workload.profile.num_layers else []
        )
        return TimedStage(
            first, last, forward_s + sum(e[0] for e in ends), backward_s + sum(e[1] for e in ends), recomputed
        )

    def layer_times(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: ZeroStage) -> LayerTimes:
        """Return a stage's seconds by its number of equal layers.

        Equals `fit_stage` for every number of layers, in closed form; equal tables are one object.
        """
        key = (is_first, is_last, in_flight, dp if zero else 1, zero)
        found = self._layer_times.get(key)
        if found is None:
            seconds = tuple(self._layer_seconds(is_first, is_last, in_flight, dp, zero))
            found = self._layer_times[key] = self._interned.setdefault(seconds, LayerTimes(seconds))
        return found

    def _layer_room_bytes(
        self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: ZeroStage
    ) -> tuple[float, float, float]:
        """Return the bytes left for layers without and with recomputation, and the bytes of one layer."""
        dense, expert, kept, _ = self._memory_sums
        each, each_expert = self._static_bytes(dp, zero)
        layer_bytes = dense[1] * each + expert[1] * each_expert + in_flight * kept[1]
        limit = self.memory_limit_bytes / self.workload.reserved_ratio
        plain, recomputed = (
            self._beside_layers(is_first, is_last, False, zero),
            self._beside_layers(is_first, is_last, True, zero),
        )
        return (
            limit - plain[0] * each - in_flight * plain[1] - plain[2],
            limit - recomputed[0] * each - in_flight * recomputed[1] - recomputed[2],
            layer_bytes,
        )

    def max_layers(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: ZeroStage) -> int:
        """Return how many equal layers fit if all may be recomputed."""
        key = (is_first, is_last, in_flight, dp if zero else 1, zero)
        found = self._max_layers.get(key)
        if found is None:
            plain, recomputed, layer_bytes = self._layer_room_bytes(is_first, is_last, in_flight, dp, zero)
            least_bytes = layer_bytes - in_flight * self._memory_sums[3][1]
            found = max(0, math.floor(plain / layer_bytes), math.floor(recomputed / least_bytes))
            self._max_layers[key] = found
        return found

    def _layer_seconds(
        self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: ZeroStage
    ) -> Iterator[float]:
        """Yield the seconds of 1, 2, ... equal layers as far as they fit."""
        plain, recomputing, layer_bytes = self._layer_room_bytes(is_first, is_last, in_flight, dp, zero)
        saved = in_flight * self._memory_sums[3][1]
        layer_s, recompute_s = self._layer_passes[0][0] + self._layer_passes[0][1], self._layer_passes[0][2]
        end_s = sum(self._end_passes[0]) * is_first + sum(self._end_passes[1]) * is_last
        layers = self.workload.profile.num_layers
        easy = next((n for n in range(layers, 0, -1) if n * layer_bytes <= plain), 0)
        yield from (end_s + count * layer_s for count in range(1, easy + 1))
        for count in range(easy + 1, layers + 1):
            recomputed = max(1, math.ceil((count * layer_bytes - recomputing) / saved - 1e-9)) if saved else count + 1
            if recomputed > count:
                return
            yield end_s + count * layer_s + recomputed * recompute_s

    def range_times(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: ZeroStage) -> RangeTimes:
        """Return a stage's seconds by its range of unequal layers."""
        key = (is_first, is_last, in_flight, dp if zero else 1, zero)
        if key not in self._range_times:
            self._range_times[key] = range_times(
                lambda first, lasts: self.range_seconds(first, lasts, in_flight, dp, zero),
                self.workload.equal_suffix_start, is_first, is_last,
            )  # fmt: skip
        return self._range_times[key]

    def range_seconds(
        self, first: int, lasts: Iterable[int], in_flight: int, dp: int, zero: ZeroStage
    ) -> Iterator[float]:
        """Yield the seconds of stages of layers `[first, last)` for ascending `lasts`, as far as they fit.

        Equals `fit_stage`, in closed form: the number of recomputed layers is found in prefix sums.
        """
        dense, expert, kept, saved = self._memory_sums
        forward, backward, more = self._time_sums
        each, each_expert = self._static_bytes(dp, zero)
        room = self.memory_limit_bytes / self.workload.reserved_ratio - 1.0  # one byte for rounding
        for last in lasts:
            is_last = last == self.workload.profile.num_layers
            plain, recomputed = (self._beside_layers(first == 0, is_last, one, zero) for one in (False, True))
            held = (dense[last] - dense[first]) * each + (expert[last] - expert[first]) * each_expert
            held += in_flight * (kept[last] - kept[first])
            seconds = forward[last] - forward[first] + backward[last] - backward[first]
            seconds += sum(self._end_passes[0]) * (first == 0) + sum(self._end_passes[1]) * is_last
            if held + plain[0] * each + in_flight * plain[1] + plain[2] > room:
                over = held + recomputed[0] * each + in_flight * recomputed[1] + recomputed[2] - room
                end = bisect_left(saved, saved[first] + over / in_flight, first + 1)
                if end > last:
                    return
                seconds += more[end] - more[first]
            yield seconds
