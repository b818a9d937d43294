"""`Seat`: what a stage costs at a spot under one cut and one micro-batch size, as a table by its layers.

Times are those of `plan.time.stage`, bytes those of `plan.memory.stage`, each taken apart once into
sums over layers. Bytes are never below those of `stage_memory` (what lives only while a layer is computed is
taken at its largest), so that what fits here fits there.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from isthmus.core.chip import Chip, Precision
from isthmus.plan.memory.peak import Load, held_layer
from isthmus.plan.memory.stage import OUTER_BYTES, Degrees, stage_memory
from isthmus.plan.profile.model import LayerProfile, ModelProfile, Recompute
from isthmus.plan.search.ranges import RangeTimes, range_times
from isthmus.plan.search.recomputation import fewest_recomputed
from isthmus.plan.search.share import LayerTimes
from isthmus.plan.search.spots import Spot
from isthmus.plan.time.calibration import Calibration
from isthmus.plan.time.collectives import all_reduce_s
from isthmus.plan.time.stage import Batch, Host, host_update_s, pass_time, stage_pass, update_s
from isthmus.plan.time.work import layer_work

COMPUTE_EFFICIENCY = 0.45
"""Share of a virtual chip's peak that it is paced to: what a worker pads its computation to is this."""

MEMORY_FRACTION = 0.95
"""Share of a chip's memory that a stage may plan to fill."""

RESERVE = 1.05
"""Allocator's reserve, as `stage_memory` takes it."""

_STATIC_BYTES = {"bf16": (2, 4, 12), "fp32": (4, 4, 8)}
"""Bytes per parameter of weights, gradients and optimizer."""


@dataclass(frozen=True)
class Task:
    """What is trained, apart from where: the model, the batch, and how its costs are known.

    With `local_steps` above 1 every layout has groups of islands that average so often; seats hold what that
    takes.
    """

    profile: ModelProfile
    sequence_length: int
    precision: Precision
    calibration: Calibration
    local_steps: int = field(default=1, kw_only=True)
    optimizer_on_host: bool = field(default=False, kw_only=True)

    @cached_property
    def equal_layers(self) -> bool:
        """Whether all decoder layers are alike."""
        return len(self.kinds) == 1

    @cached_property
    def kinds(self) -> tuple[LayerProfile, ...]:
        """The distinct layers (equal ones are one object)."""
        return tuple({id(layer): layer for layer in self.profile.layers}.values())

    @cached_property
    def start(self) -> tuple[int, ...]:
        """For each layer the first one, from 1 on, after which the same layers follow as after it."""
        layers = [id(layer) for layer in self.profile.layers]
        count = len(layers)
        return tuple(
            next(
                (one for one in range(1, first) if layers[one : one + count - first] == layers[first:]), first
            )
            for first in range(count)
        )

    @property
    def static_bytes(self) -> tuple[int, int, int]:
        """Bytes per parameter of weights, gradients and optimizer on the chip, an outer one included."""
        weights, gradients, optimizer = _STATIC_BYTES[self.stored]
        if self.optimizer_on_host:
            return weights, gradients, 0
        return weights, gradients, optimizer + OUTER_BYTES * (self.local_steps > 1)

    @property
    def stored(self) -> Literal["fp32", "bf16"]:
        """Precision of the weights as `stage_memory` names it."""
        return "fp32" if self.precision in ("fp32", "tf32") else "bf16"


@dataclass(frozen=True)
class StageCut:
    """One stage as cut: layers `[first, last)`, seconds of both passes, number of recomputed layers."""

    first: int
    last: int
    forward_s: float
    backward_s: float
    recomputed: int

    @property
    def total_s(self) -> float:
        """Seconds of a micro-batch, both ways."""
        return self.forward_s + self.backward_s


FEW_REPLICAS = 16


def few(dp: int) -> int:
    """Return a number of replicas that is no smaller, of which there are few: for bounds on memory.

    More replicas that share an optimizer take no more memory each.
    """
    return dp if dp <= FEW_REPLICAS else 1 << (dp - 1).bit_length()


Zero = Literal[0, 1, 2, 3]
_MODES: tuple[Recompute, Recompute] = ("none", "full")


class Seat:
    """The costs of stages on one kind of chips. Equal kinds of spots share one seat."""

    def __init__(self, task: Task, spot: Spot, degrees: Degrees, micro_batch_size: int) -> None:
        self.task, self.degrees = task, degrees
        self.chip: Chip = spot.chip
        self.virtual = spot.group.virtual is not None
        self.host = Host.of(spot.group, spot.chip, task.calibration)
        self.batch = Batch(
            micro_batch_size=micro_batch_size, sequence_length=task.sequence_length, precision=task.precision
        )
        self.num_chips = degrees.tp * degrees.cp
        self._tables: dict[tuple[bool, bool, int, int, int], LayerTimes] = {}
        self._statics: dict[tuple[int, int], tuple[float, float]] = {}
        self._same: dict[tuple[float, ...], LayerTimes] = {}
        self._weighed: dict[int, float] = {}
        self._ranges: dict[tuple[bool, bool, int, int, int], RangeTimes] = {}

    # --- seconds ---

    @cached_property
    def _layers(self) -> list[tuple[float, float, float]]:
        """Seconds of each layer: forward, backward, and what recomputing it adds to the backward."""
        known = {id(layer): self._layer(layer) for layer in self.task.kinds}
        return [known[id(layer)] for layer in self.task.profile.layers]

    def _layer(self, layer: LayerProfile) -> tuple[float, float, float]:
        task, batch = self.task, self.batch
        if self.virtual:
            tokens = batch.micro_batch_size * batch.sequence_length
            forward_s = layer.forward_flops(batch.sequence_length, tokens) / self._paced
            return forward_s, 2 * forward_s, forward_s
        work = layer_work(layer, batch.share(self.degrees))
        plain = pass_time(self.host, work, task.precision)
        again = pass_time(self.host, work, task.precision, "full")
        return plain.forward_s, plain.backward_s, again.backward_s - plain.backward_s

    @property
    def _paced(self) -> float:
        return self.chip.flop_per_s(self.task.precision) * COMPUTE_EFFICIENCY

    @cached_property
    def _ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Seconds (forward, backward) of the embedding and of the head."""
        task, batch = self.task, self.batch
        profile, count = task.profile, task.profile.num_layers
        if self.virtual:
            tokens = batch.micro_batch_size * batch.sequence_length
            head_s = profile.head.forward_flops(batch.sequence_length, tokens) / self._paced
            return (0.0, 0.0), (head_s, 2 * head_s)
        layers = self._layers
        whole = stage_pass(profile, (0, count), self.host, batch, self.degrees)
        start = stage_pass(profile, (0, 1), self.host, batch, self.degrees) if count > 1 else whole
        first = (start.forward_s - layers[0][0], start.backward_s - layers[0][1])
        if count == 1:
            return (0.0, 0.0), first
        rest = (sum(one[0] for one in layers), sum(one[1] for one in layers))
        return first, (whole.forward_s - rest[0] - first[0], whole.backward_s - rest[1] - first[1])

    @cached_property
    def _sums(self) -> tuple[list[float], list[float], list[float]]:
        """Sums over the layers before each: forward, backward, recomputation."""
        columns = ([one[i] for one in self._layers] for i in range(3))
        forward, backward, again = ([0.0, *itertools.accumulate(column)] for column in columns)
        return forward, backward, again

    @cached_property
    def message_bytes(self) -> float:
        """Bytes of one micro-batch over a stage boundary."""
        tokens = self.batch.micro_batch_size * self.batch.sequence_length
        return self.task.profile.boundary_bytes(tokens, self.batch.precision_bytes)

    @cached_property
    def shortest_layer_s(self) -> float:
        """Seconds of the shortest layer, both ways, without recomputation."""
        return min(sum(one[:2]) for one in self._layers)

    @cached_property
    def least_layer_s(self) -> float:
        """Seconds of the mean layer, both ways, without recomputation: what no stage can do faster."""
        forward, backward, _ = self._sums
        return (forward[-1] + backward[-1]) / self.task.profile.num_layers

    def layer_s(self, other: Seat) -> float:
        """Return the least seconds of a layer both ways, unlike ones weighed by what they take on `other`.

        Whatever layers a stage takes, it takes at least this for each that the mean layer of `other` weighs.
        """
        if self.task.equal_layers or other is self:
            return self.least_layer_s
        if id(other) not in self._weighed:
            pairs = [(sum(a[:2]), sum(b[:2])) for a, b in zip(self._layers, other._layers, strict=True)]
            self._weighed[id(other)] = min(own / its for own, its in pairs) * other.least_layer_s
        return self._weighed[id(other)]

    @cached_property
    def forward_share(self) -> tuple[float, float]:
        """Least and largest share of a pass, both ways, that is forward; the head's left out."""
        parts = [self._layers[index] for index in range(self.task.profile.num_layers)]
        least = min(one[0] / sum(one) for one in parts)
        most = max(one[0] / (one[0] + one[1]) for one in parts)
        start, end = self._ends
        if sum(start):
            most, least = max(most, start[0] / sum(start)), min(least, start[0] / sum(start))
        return (min(least, end[0] / sum(end)) if sum(end) else least), most

    @cached_property
    def least_parameters(self) -> float:
        """Parameters of the smallest layer on one chip."""
        dense, expert, _, _ = self._held
        sums = [a + b for a, b in zip(dense, expert, strict=True)]
        return min(b - a for a, b in itertools.pairwise(sums))

    def end_parameters(self, is_first: bool) -> float:
        """Parameters on one chip that the first stage (or the last) holds beside its layers."""
        return self._rest[is_first, not is_first, False][0]

    @property
    def rest_s(self) -> float:
        """Seconds of an optimizer's step whatever it updates."""
        return 0.0 if self.virtual else self.host.rates.step_s

    @cached_property
    def head_s(self) -> float:
        """Seconds of embedding and head, both ways."""
        return sum(map(sum, self._ends))

    def update_s(self, parameters: float, dealt: int) -> float:
        """Return the seconds of the optimizer on `parameters` per chip, dealt out over `dealt` chips."""
        if self.virtual:
            return 0.0
        own, each = parameters / dealt, self.batch.precision_bytes
        if self.task.optimizer_on_host:
            return self.host.rates.step_s + host_update_s(own, each)
        return self.host.rates.step_s + update_s(self.host, own, each)

    def reduce_s(self, parameters: float, dp: int, zero: Zero) -> float:
        """Return the seconds of the all-reduce of `parameters` gradients per chip over `dp` replicas here."""
        num_bytes = 4 * parameters * (0.75 if zero else 1.0)
        return all_reduce_s(self.host.topology, num_bytes, dp, self.num_chips)

    # --- bytes ---

    @cached_property
    def _load(self) -> Load:
        return Load(
            tokens=self.batch.micro_batch_size * self.batch.sequence_length / self.degrees.cp,
            sequence_length=self.batch.sequence_length,
            precision_bytes=4 if self.task.stored == "fp32" else 2,
        )

    @cached_property
    def _held(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Sums over the layers before each: dense, expert parameters, bytes kept, and saved if recomputed."""
        rows: dict[int, tuple[float, float, float, float]] = {}
        for layer in self.task.kinds:
            shard = self.degrees.sharding(layer)
            plain, again = (held_layer(layer, mode, shard, self._load) for mode in _MODES)
            rows[id(layer)] = (
                plain.dense_parameters,
                plain.expert_parameters,
                plain.kept_bytes,
                plain.kept_bytes - again.kept_bytes,
            )
        each = [rows[id(layer)] for layer in self.task.profile.layers]
        dense, expert, kept, saved = ([0.0, *itertools.accumulate(e[i] for e in each)] for i in range(4))
        return dense, expert, kept, saved

    @cached_property
    def _rest(self) -> dict[tuple[bool, bool, bool], tuple[float, float, float]]:
        """By (is first, is last, recomputes): parameters, kept bytes and working bytes beside the layers'."""
        task, degrees, found = self.task, self.degrees, {}
        dense, expert, kept, saved = self._held
        per_parameter = sum(_STATIC_BYTES[task.stored])
        indices = {id(layer): index for index, layer in enumerate(task.profile.layers)}.values()
        for is_first, is_last, again in itertools.product((False, True), repeat=3):
            answers = []
            for i in indices:
                memory = stage_memory(
                    task.profile, (i, i + 1), is_first=is_first, is_last=is_last, in_flight=1,
                    micro_batch_size=self.batch.micro_batch_size, sequence_length=task.sequence_length,
                    precision=task.stored, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep, sp=degrees.sp,
                    recompute="full" if again else "none",
                )  # fmt: skip
                own = dense[i + 1] - dense[i] + expert[i + 1] - expert[i]
                here = kept[i + 1] - kept[i] - (saved[i + 1] - saved[i] if again else 0.0)
                answers.append(
                    (
                        memory.static_bytes / per_parameter - own,
                        memory.activations_bytes - here,
                        memory.buffers_bytes,
                    )
                )
            found[is_first, is_last, again] = (
                max(a[0] for a in answers),
                max(a[1] for a in answers),
                max(a[2] for a in answers),
            )
        return found

    def parameters(self, first: int, last: int) -> float:
        """Return the parameters of layers `[first, last)`, ends included, on one chip."""
        dense, expert, _, _ = self._held
        rest, _, _ = self._rest[first == 0, last == self.task.profile.num_layers, False]
        return dense[last] - dense[first] + expert[last] - expert[first] + rest

    def stage_bytes(self, first: int, last: int, in_flight: int, again: int, dp: int, zero: Zero) -> float:
        """Return the bytes of one chip with `again` recomputed layers, replicated `dp` times."""
        dense, expert, kept, saved = self._held
        rest, beside, working = self._rest[first == 0, last == self.task.profile.num_layers, again > 0]
        each, each_expert = self._static(dp, zero)
        static = (dense[last] - dense[first] + rest) * each + (expert[last] - expert[first]) * each_expert
        keeps = beside + kept[last] - kept[first] - (saved[first + again] - saved[first])
        return RESERVE * (static + in_flight * keeps + working)

    def _static(self, dp: int, zero: Zero) -> tuple[float, float]:
        """Return the bytes held per parameter, and per parameter of experts."""
        if zero == 0:
            whole = sum(self.task.static_bytes)
            return whole, whole
        if (dp, zero) not in self._statics:
            self._statics[dp, zero] = self._dealt(dp, zero)
        return self._statics[dp, zero]

    def _dealt(self, dp: int, zero: Zero) -> tuple[float, float]:
        cut = self.degrees
        over = Degrees(tp=cut.tp, cp=cut.cp, ep=cut.ep, dp=dp, sp=cut.sp, zero=zero)
        weights, gradients, optimizer = self.task.static_bytes
        dense, expert = (
            weights + gradients / over.dealt(2, expert=e) + optimizer / over.dealt(1, expert=e)
            for e in (False, True)
        )
        return dense, expert

    # --- stages ---

    def cut(self, first: int, last: int, in_flight: int, dp: int, zero: Zero) -> StageCut | None:
        """Return the stage of layers `[first, last)`, recomputed as far as needed, or None (algorithm 1)."""
        limit = self.chip.memory_bytes * MEMORY_FRACTION
        count = last - first

        def needs(again: int) -> float:
            return self.stage_bytes(first, last, in_flight, again, dp, zero)

        again = fewest_recomputed(count, needs, limit)
        if again is None:
            return None
        return self.timed(first, last, again)

    def timed(self, first: int, last: int, again: int) -> StageCut:
        """Return the stage of layers `[first, last)` with `again` of them recomputed, whatever it holds."""
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
        """Return the seconds by number of layers of a stage in its place, for models of equal layers.

        The same as `cut` for every number of layers, in closed form; equal tables are one object.
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
        """Return the bytes left for layers without and with recomputation, and those of one layer."""
        dense, expert, kept, _ = self._held
        each, each_expert = self._static(dp, zero)
        layer_bytes = dense[1] * each + expert[1] * each_expert + in_flight * kept[1]
        limit = self.chip.memory_bytes * MEMORY_FRACTION / RESERVE
        plain, again = self._rest[is_first, is_last, False], self._rest[is_first, is_last, True]
        return (
            limit - plain[0] * each - in_flight * plain[1] - plain[2],
            limit - again[0] * each - in_flight * again[1] - again[2],
            layer_bytes,
        )

    def most_layers(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero) -> int:
        """Return how many equal layers fit, all recomputed if need be."""
        plain, again, layer_bytes = self._room(is_first, is_last, in_flight, dp, zero)
        least_bytes = layer_bytes - in_flight * self._held[3][1]
        return max(0, math.floor(plain / layer_bytes), math.floor(again / least_bytes))

    def _seconds(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero) -> Iterator[float]:
        """Yield the seconds of 1, 2, ... equal layers as long as they fit."""
        plain, recomputing, layer_bytes = self._room(is_first, is_last, in_flight, dp, zero)
        saved = in_flight * self._held[3][1]
        layer_s, again_s = self._layers[0][0] + self._layers[0][1], self._layers[0][2]
        end_s = sum(self._ends[0]) * is_first + sum(self._ends[1]) * is_last
        layers = self.task.profile.num_layers
        easy = next((n for n in range(layers, 0, -1) if n * layer_bytes <= plain), 0)
        yield from (end_s + count * layer_s for count in range(1, easy + 1))
        for count in range(easy + 1, layers + 1):
            again = (
                max(1, math.ceil((count * layer_bytes - recomputing) / saved - 1e-9)) if saved else count + 1
            )
            if again > count:
                return
            yield end_s + count * layer_s + again * again_s

    def ranges(self, is_first: bool, is_last: bool, in_flight: int, dp: int, zero: Zero) -> RangeTimes:
        """Return the seconds by the range of layers of a stage in its place, for models of unlike layers."""
        key = (is_first, is_last, in_flight, dp if zero else 1, zero)
        if key not in self._ranges:
            self._ranges[key] = range_times(
                lambda first, lasts: self.row(first, lasts, in_flight, dp, zero),
                self.task.start, is_first, is_last,
            )  # fmt: skip
        return self._ranges[key]

    def row(self, first: int, lasts: Iterable[int], in_flight: int, dp: int, zero: Zero) -> Iterator[float]:
        """Yield the seconds of the stages of layers `[first, last)`, for rising `lasts`, as long as they fit.

        The same as `cut`, in closed form: how many layers are recomputed is found in sums.
        """
        dense, expert, kept, saved = self._held
        forward, backward, more = self._sums
        each, each_expert = self._static(dp, zero)
        room = self.chip.memory_bytes * MEMORY_FRACTION / RESERVE - 1.0  # a byte for rounding
        for last in lasts:
            is_last = last == self.task.profile.num_layers
            plain, again = (self._rest[first == 0, is_last, one] for one in (False, True))
            held = (dense[last] - dense[first]) * each + (expert[last] - expert[first]) * each_expert
            held += in_flight * (kept[last] - kept[first])
            seconds = forward[last] - forward[first] + backward[last] - backward[first]
            seconds += sum(self._ends[0]) * (first == 0) + sum(self._ends[1]) * is_last
            if held + plain[0] * each + in_flight * plain[1] + plain[2] > room:
                over = held + again[0] * each + in_flight * again[1] + again[2] - room
                end = bisect_left(saved, saved[first] + over / in_flight, first + 1)
                if end > last:
                    return
                seconds += more[end] - more[first]
            yield seconds
