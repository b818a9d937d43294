"""`SeatBytes`: a stage's memory at a slot, computed from sums over its layers.

Never below `plan.memory.stage_memory`, since temporary buffers are taken at their largest: what fits here
fits there.
"""

from __future__ import annotations

import itertools
from functools import cached_property

from isthmus.plan.memory.peak import Load, held_layer
from isthmus.plan.memory.stage_memory import Degrees, stage_memory
from isthmus.plan.profile.model_profile import Recompute
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_seconds import SeatSeconds
from isthmus.plan.search.costs.task import STATIC_BYTES, Task, Zero

RESERVE = 1.05
"""Allocator reserve, as in `stage_memory`."""

_MODES: tuple[Recompute, Recompute] = ("none", "full")


class SeatBytes(SeatSeconds):
    """Seconds and bytes of stages on one kind of chip, for fixed degrees and micro-batch size."""

    def __init__(self, task: Task, spot: Spot, degrees: Degrees, micro_batch_size: int) -> None:
        super().__init__(task, spot, degrees, micro_batch_size)
        self._statics: dict[tuple[int, int], tuple[float, float]] = {}
        self._least_last: dict[tuple[int, int, int], float] = {}

    @cached_property
    def _load(self) -> Load:
        return Load(
            tokens=self.batch.micro_batch_size * self.batch.sequence_length / self.degrees.cp,
            sequence_length=self.batch.sequence_length,
            precision_bytes=4 if self.task.stored == "fp32" else 2,
        )

    @cached_property
    def _held(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Prefix sums over layers: dense parameters, expert parameters, bytes kept, bytes saved.

        Shape [num_layers + 1] each. Bytes are per micro-batch in flight; recomputation saves the last ones.
        """
        rows: dict[int, tuple[float, float, float, float]] = {}
        for layer in self.task.kinds:
            shard = self.degrees.sharding(layer)
            plain, recomputed = (held_layer(layer, mode, shard, self._load) for mode in _MODES)
            rows[id(layer)] = (
                plain.dense_parameters,
                plain.expert_parameters,
                plain.kept_bytes,
                plain.kept_bytes - recomputed.kept_bytes,
            )
        each = [rows[id(layer)] for layer in self.task.profile.layers]
        dense, expert, kept, saved = ([0.0, *itertools.accumulate(e[i] for e in each)] for i in range(4))
        return dense, expert, kept, saved

    @cached_property
    def _rest(self) -> dict[tuple[bool, bool, bool], tuple[float, float, float]]:
        """By (is first, is last, recomputes): parameters, kept bytes and working bytes beside the layers'."""
        task, degrees, found = self.task, self.degrees, {}
        dense, expert, kept, saved = self._held
        per_parameter = sum(STATIC_BYTES[task.stored])
        indices = {id(layer): index for index, layer in enumerate(task.profile.layers)}.values()
        for is_first, is_last, recomputed in itertools.product((False, True), repeat=3):
            answers = []
            for i in indices:
                memory = stage_memory(
                    task.profile, (i, i + 1), is_first=is_first, is_last=is_last, in_flight=1,
                    micro_batch_size=self.batch.micro_batch_size, sequence_length=task.sequence_length,
                    precision=task.stored, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep, sp=degrees.sp,
                    recompute="full" if recomputed else "none",
                )  # fmt: skip
                own = dense[i + 1] - dense[i] + expert[i + 1] - expert[i]
                here = kept[i + 1] - kept[i] - (saved[i + 1] - saved[i] if recomputed else 0.0)
                answers.append(
                    (
                        memory.static_bytes / per_parameter - own,
                        memory.activations_bytes - here,
                        memory.buffers_bytes,
                    )
                )
            found[is_first, is_last, recomputed] = (
                max(a[0] for a in answers),
                max(a[1] for a in answers),
                max(a[2] for a in answers),
            )
        return found

    @cached_property
    def least_parameters(self) -> float:
        """Parameters of the smallest layer on one chip."""
        dense, expert, _, _ = self._held
        sums = [a + b for a, b in zip(dense, expert, strict=True)]
        return min(b - a for a, b in itertools.pairwise(sums))

    def least_last_s(self, layers: int, dp: int, zero: Zero) -> float:
        """Return the least seconds of all-reduce and update of a stage with this many layers."""
        key = (layers, dp, zero)
        if key not in self._least_last:
            self._least_last[key] = self.last_s(layers * self.least_parameters, dp, zero)
        return self._least_last[key]

    def end_parameters(self, is_first: bool) -> float:
        """Return the parameters on one chip that the first (or last) stage holds beside its layers."""
        return self._rest[is_first, not is_first, False][0]

    def parameters(self, first: int, last: int) -> float:
        """Return the parameters of layers `[first, last)` on one chip, embedding and head included."""
        dense, expert, _, _ = self._held
        rest, _, _ = self._rest[first == 0, last == self.task.profile.num_layers, False]
        return dense[last] - dense[first] + expert[last] - expert[first] + rest

    def stage_bytes(self, first: int, last: int, in_flight: int, again: int, dp: int, zero: Zero) -> float:
        """Return the bytes of one chip with `again` layers recomputed, replicated `dp` times."""
        dense, expert, kept, saved = self._held
        rest, beside, working = self._rest[first == 0, last == self.task.profile.num_layers, again > 0]
        each, each_expert = self._static(dp, zero)
        static = (dense[last] - dense[first] + rest) * each + (expert[last] - expert[first]) * each_expert
        keeps = beside + kept[last] - kept[first] - (saved[first + again] - saved[first])
        return RESERVE * (static + in_flight * keeps + working)

    def _static(self, dp: int, zero: Zero) -> tuple[float, float]:
        """Return the static bytes per dense and per expert parameter."""
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
