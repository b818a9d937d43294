"""`StageBytes`: a stage's memory at a slot, computed from sums over its layers.

Never below `plan.memory.stage_memory`, since temporary buffers are taken at their largest: what fits here
fits there.
"""

from __future__ import annotations

import itertools
from functools import cached_property

from isthmus.plan.memory.backward_peak import MicroBatchLoad, layer_memory
from isthmus.plan.memory.memory_limit import device_bytes, memory_limit_bytes
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import end_parameters, most_in_turn, stage_memory, state_bytes
from isthmus.plan.profile.component import Recompute
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_seconds import StageSeconds
from isthmus.plan.search.costs.workload import TrainingWorkload, ZeroStage

_MODES: tuple[Recompute, Recompute] = ("none", "full")


class StageBytes(StageSeconds):
    """Seconds and bytes of stages on one kind of chip, for fixed degrees and micro-batch size."""

    def __init__(
        self, workload: TrainingWorkload, slot: ChipSlot, degrees: StageDegrees, micro_batch_size: int
    ) -> None:
        super().__init__(workload, slot, degrees, micro_batch_size)
        self._static_cache: dict[tuple[int, int], tuple[float, float]] = {}
        self._least_update: dict[tuple[int, int, int], float] = {}

    @cached_property
    def _load(self) -> MicroBatchLoad:
        return MicroBatchLoad(
            tokens=self.batch.micro_batch_size * self.batch.sequence_length / self.degrees.cp,
            sequence_length=self.batch.sequence_length,
            precision_bytes=4 if self.workload.stored_precision == "fp32" else 2,
            fused_weight_gradients=self.workload.profile.stack.fused_weight_gradients,
        )

    @cached_property
    def memory_limit_bytes(self) -> float:
        """What the allocator may reserve on a chip of a stage."""
        stack = self.workload.profile.stack
        return memory_limit_bytes(device_bytes(self.chip), stack, self.degrees)

    @cached_property
    def _memory_sums(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Prefix sums over layers: dense parameters, expert parameters, bytes kept, bytes saved.

        Shape [num_layers + 1] each. Bytes are per micro-batch in flight; recomputation saves the last ones.
        """
        rows: dict[int, tuple[float, float, float, float]] = {}
        for layer in self.workload.layer_kinds:
            shard = self.degrees.sharding(layer)
            plain, recomputed = (layer_memory(layer, mode, shard, self._load) for mode in _MODES)
            rows[id(layer)] = (
                plain.dense_parameters,
                plain.expert_parameters,
                plain.activation_bytes,
                plain.activation_bytes - recomputed.activation_bytes,
            )
        each = [rows[id(layer)] for layer in self.workload.profile.layers]
        dense, expert, kept, saved = ([0.0, *itertools.accumulate(e[i] for e in each)] for i in range(4))
        return dense, expert, kept, saved

    @cached_property
    def _end_memory(self) -> dict[tuple[bool, bool, bool], tuple[float, float, float]]:
        """By (is first, is last, recomputes): parameters, kept bytes and working bytes beside the layers'."""
        task, degrees, found = self.workload, self.degrees, {}
        dense, expert, kept, saved = self._memory_sums
        each = state_bytes(task.profile, task.stored_precision)
        per_parameter = each.weights + each.gradients + each.optimizer
        indices = {id(layer): index for index, layer in enumerate(task.profile.layers)}.values()
        for is_first, is_last, recomputed in itertools.product((False, True), repeat=3):
            answers = []
            for i in indices:
                memory = stage_memory(
                    task.profile, (i, i + 1), is_first=is_first, is_last=is_last, in_flight=1,
                    micro_batch_size=self.batch.micro_batch_size, sequence_length=task.sequence_length,
                    precision=task.stored_precision, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep, sp=degrees.sp,
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
        dense, expert, _, _ = self._memory_sums
        sums = [a + b for a, b in zip(dense, expert, strict=True)]
        return min(b - a for a, b in itertools.pairwise(sums))

    def least_reduce_and_update_s(self, num_layers: int, dp: int, zero: ZeroStage) -> float:
        """Return the least seconds of all-reduce and update of a stage with this many layers."""
        key = (num_layers, dp, zero)
        if key not in self._least_update:
            self._least_update[key] = self.reduce_and_update_s(num_layers * self.least_parameters, dp, zero)
        return self._least_update[key]

    def end_parameters(self, is_first: bool) -> float:
        """Return the parameters on one chip that the first (or last) stage holds beside its layers."""
        return self._end_memory[is_first, not is_first, False][0]

    def parameters(self, first: int, last: int) -> float:
        """Return the parameters of layers `[first, last)` on one chip, embedding and head included."""
        dense, expert, _, _ = self._memory_sums
        rest, _, _ = self._end_memory[first == 0, last == self.workload.profile.num_layers, False]
        return dense[last] - dense[first] + expert[last] - expert[first] + rest

    def stage_bytes(self, first: int, last: int, in_flight: int, recomputed: int, dp: int, zero: ZeroStage) -> float:
        """Return the bytes of one chip with `recomputed` layers recomputed, replicated `dp` times."""
        dense, expert, kept, saved = self._memory_sums
        is_last = last == self.workload.profile.num_layers
        rest, beside, working = self._beside_layers(first == 0, is_last, recomputed > 0, zero)
        each, each_expert = self._static_bytes(dp, zero)
        static = (dense[last] - dense[first] + rest) * each + (expert[last] - expert[first]) * each_expert
        keeps = beside + kept[last] - kept[first] - (saved[first + recomputed] - saved[first])
        return self.workload.reserved_ratio * (static + in_flight * keeps + working)

    def _beside_layers(
        self, is_first: bool, is_last: bool, recomputed: bool, zero: ZeroStage
    ) -> tuple[float, float, float]:
        """Return parameters, kept bytes and working bytes beside the layers', with those that ZeRO 3 has gathered."""
        rest, kept, working = self._end_memory[is_first, is_last, recomputed]
        return rest, kept, working + (self._gathered_bytes if zero == 3 else self._unreduced_bytes if zero == 2 else 0)

    @cached_property
    def _gathered_bytes(self) -> float:
        """Most bytes of gathered weights and of gradients before their reduction; a stage keeps few layers whole.

        A stack that keeps a whole stage gathered in a pipeline is searched without one.
        """
        profile, rule = self.workload.profile, self.workload.profile.stack.gathered
        shard = self.degrees.sharding(profile.layers[0])
        ends = profile.embedding.on_chip(shard) + profile.head.on_chip(shard) if rule.ends else 0
        each, weights = rule.element_bytes or self._load.precision_bytes, rule.layers * max(self._layer_parameters)
        if rule.ends_in_turn:
            table, head = end_parameters(profile, shard)
            weights = most_in_turn([table, *self._layer_parameters, head], rule.layers)
        return each * (weights + ends) + self._unreduced_bytes

    @cached_property
    def _unreduced_bytes(self) -> float:
        """Most bytes of a layer's gradients before their reduction, and of the stack's own buffers."""
        stack = self.workload.profile.stack
        return stack.gathered.gradient_bytes * max(self._layer_parameters) + stack.buffer_bytes

    @cached_property
    def _layer_parameters(self) -> list[float]:
        """Parameters of each layer on one chip."""
        dense, expert, _, _ = self._memory_sums
        sums = [a + b for a, b in zip(dense, expert, strict=True)]
        return [b - a for a, b in itertools.pairwise(sums)]

    def _static_bytes(self, dp: int, zero: ZeroStage) -> tuple[float, float]:
        """Return the static bytes per dense and per expert parameter."""
        if zero == 0:
            whole = sum(self.workload.static_bytes)
            return whole, whole
        if (dp, zero) not in self._static_cache:
            self._static_cache[dp, zero] = self._sharded_static_bytes(dp, zero)
        return self._static_cache[dp, zero]

    def _sharded_static_bytes(self, dp: int, zero: ZeroStage) -> tuple[float, float]:
        cut = self.degrees
        over = StageDegrees(tp=cut.tp, cp=cut.cp, ep=cut.ep, dp=dp, sp=cut.sp, zero=zero)
        weights, gradients, optimizer = self.workload.static_bytes
        dense, expert = (
            weights / over.zero_shards(3, expert=e)
            + gradients / over.zero_shards(2, expert=e)
            + optimizer / over.zero_shards(1, expert=e)
            for e in (False, True)
        )
        return dense, expert
