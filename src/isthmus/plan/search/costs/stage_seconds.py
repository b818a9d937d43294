"""`StageSeconds`: a stage's seconds at a slot, from sums over its layers; as `plan.time.stage_time`."""

from __future__ import annotations

import itertools
from functools import cached_property

from isthmus.core.chip import Chip
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.layer_profile import LayerProfile
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.workload import REDUCED_RATIO, TrainingWorkload, ZeroStage
from isthmus.plan.time.collectives import all_reduce_s
from isthmus.plan.time.stage_time import ChipModel, MicroBatchShape, host_update_s, pass_time, stage_pass_time, update_s
from isthmus.plan.time.stage_work import layer_work

COMPUTE_EFFICIENCY = 0.45
"""Share of a virtual chip's peak speed to which workers pad their computation."""


class StageSeconds:
    """Seconds of stages on one kind of chip, for fixed degrees and micro-batch size."""

    def __init__(
        self, workload: TrainingWorkload, slot: ChipSlot, degrees: StageDegrees, micro_batch_size: int
    ) -> None:
        self.workload, self.degrees = workload, degrees
        self.chip: Chip = slot.chip
        self.virtual = slot.group.virtual is not None
        self.chip_model = ChipModel.of(slot.group, slot.chip, workload.calibration)
        self.batch = MicroBatchShape(
            micro_batch_size=micro_batch_size,
            sequence_length=workload.sequence_length,
            precision=workload.precision,
        )
        self.num_chips = degrees.tp * degrees.cp
        self._relative_layer_s: dict[int, float] = {}

    @cached_property
    def _layer_passes(self) -> list[tuple[float, float, float]]:
        """Seconds of each layer: forward, backward, and additional backward if recomputed."""
        known = {id(layer): self._layer_pass(layer) for layer in self.workload.layer_kinds}
        return [known[id(layer)] for layer in self.workload.profile.layers]

    def _layer_pass(self, layer: LayerProfile) -> tuple[float, float, float]:
        task, batch = self.workload, self.batch
        if self.virtual:
            tokens = batch.micro_batch_size * batch.sequence_length
            forward_s = layer.forward_flops(batch.sequence_length, tokens) / self._paced_flop_per_s
            return forward_s, 2 * forward_s, forward_s
        work = layer_work(layer, batch.per_chip(self.degrees))
        plain = pass_time(self.chip_model, work, task.precision)
        recomputed = pass_time(self.chip_model, work, task.precision, "full")
        factor = self.chip_model.bias_of(task.profile.stack)
        return (
            plain.forward_s * factor,
            plain.backward_s * factor,
            (recomputed.backward_s - plain.backward_s) * factor,
        )

    @property
    def _paced_flop_per_s(self) -> float:
        return self.chip.flop_per_s(self.workload.precision) * COMPUTE_EFFICIENCY

    @cached_property
    def _end_passes(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Seconds (forward, backward) of the embedding and of the head."""
        task, batch = self.workload, self.batch
        profile, count = task.profile, task.profile.num_layers
        if self.virtual:
            tokens = batch.micro_batch_size * batch.sequence_length
            head_s = profile.head.forward_flops(batch.sequence_length, tokens) / self._paced_flop_per_s
            return (0.0, 0.0), (head_s, 2 * head_s)
        layers = self._layer_passes
        whole = stage_pass_time(profile, (0, count), self.chip_model, batch, self.degrees)
        start = stage_pass_time(profile, (0, 1), self.chip_model, batch, self.degrees) if count > 1 else whole
        first = (start.forward_s - layers[0][0], start.backward_s - layers[0][1])
        if count == 1:
            return (0.0, 0.0), first
        rest = (sum(one[0] for one in layers), sum(one[1] for one in layers))
        return first, (whole.forward_s - rest[0] - first[0], whole.backward_s - rest[1] - first[1])

    @cached_property
    def _time_sums(self) -> tuple[list[float], list[float], list[float]]:
        """Prefix sums over layers, shape [num_layers + 1] each: forward, backward, recomputation."""
        columns = ([one[i] for one in self._layer_passes] for i in range(3))
        forward, backward, recomputed = ([0.0, *itertools.accumulate(column)] for column in columns)
        return forward, backward, recomputed

    @cached_property
    def message_bytes(self) -> float:
        """Bytes of one micro-batch across a stage boundary."""
        tokens = self.batch.micro_batch_size * self.batch.sequence_length
        return self.workload.profile.boundary_bytes(tokens, self.batch.precision_bytes)

    @cached_property
    def shortest_layer_s(self) -> float:
        """Seconds of the fastest layer, both passes, without recomputation."""
        return min(sum(one[:2]) for one in self._layer_passes)

    @cached_property
    def mean_layer_s(self) -> float:
        """Seconds of the mean layer, both passes, without recomputation: a lower bound for any stage."""
        forward, backward, _ = self._time_sums
        return (forward[-1] + backward[-1]) / self.workload.profile.num_layers

    def layer_s(self, reference: StageSeconds) -> float:
        """Return the least seconds of a layer, both passes, with unequal layers weighted as on `reference`.

        A stage takes at least this long per mean layer of `reference`, whichever layers it holds.
        """
        if self.workload.equal_layers or reference is self:
            return self.mean_layer_s
        if id(reference) not in self._relative_layer_s:
            pairs = [(sum(a[:2]), sum(b[:2])) for a, b in zip(self._layer_passes, reference._layer_passes, strict=True)]
            self._relative_layer_s[id(reference)] = min(own / its for own, its in pairs) * reference.mean_layer_s
        return self._relative_layer_s[id(reference)]

    @cached_property
    def forward_share_range(self) -> tuple[float, float]:
        """Least and largest share of a pass that is forward; the largest ignores the head."""
        parts = [self._layer_passes[index] for index in range(self.workload.profile.num_layers)]
        least = min(one[0] / sum(one) for one in parts)
        most = max(one[0] / (one[0] + one[1]) for one in parts)
        start, end = self._end_passes
        if sum(start):
            most, least = max(most, start[0] / sum(start)), min(least, start[0] / sum(start))
        return (min(least, end[0] / sum(end)) if sum(end) else least), most

    @property
    def optimizer_overhead_s(self) -> float:
        """Seconds of an optimizer step independent of its parameters."""
        return 0.0 if self.virtual else self.chip_model.rates.step_s

    @cached_property
    def embedding_s(self) -> float:
        """Seconds of the embedding, both passes."""
        return sum(self._end_passes[0])

    @cached_property
    def head_s(self) -> float:
        """Seconds of the head, both passes."""
        return sum(self._end_passes[1])

    def update_s(self, parameters: float, num_shards: int) -> float:
        """Return the optimizer's seconds for `parameters` per chip, sharded over `num_shards` chips."""
        if self.virtual:
            return 0.0
        own, each = parameters / num_shards, self.batch.precision_bytes
        if self.workload.optimizer_on_host:
            return self.chip_model.rates.step_s + host_update_s(self.chip_model.chip, own, each)
        return self.chip_model.rates.step_s + update_s(self.chip_model, own, each)

    def reduce_s(self, parameters: float, dp: int, zero: ZeroStage) -> float:
        """Return the seconds to all-reduce `parameters` gradients per chip over `dp` local replicas."""
        num_bytes = 4 * parameters * REDUCED_RATIO[zero]
        return all_reduce_s(self.chip_model.topology, num_bytes, dp, self.num_chips)

    def reduce_and_update_s(self, parameters: float, dp: int, zero: ZeroStage) -> float:
        """Return the seconds of a stage's all-reduce and update for `parameters` per chip."""
        own_s = self.update_s(parameters, dp if zero else 1)
        return own_s + (self.reduce_s(parameters, dp, zero) if dp > 1 else 0.0)
