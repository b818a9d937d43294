"""`SeatSeconds`: a stage's seconds at a slot, from sums over its layers; as `plan.time.stage_time`."""

from __future__ import annotations

import itertools
from functools import cached_property

from isthmus.core.chip import Chip
from isthmus.plan.memory.stage_memory import Degrees
from isthmus.plan.profile.model_profile import LayerProfile
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.task import Task, Zero
from isthmus.plan.time.collectives import all_reduce_s
from isthmus.plan.time.stage_time import Batch, Host, host_update_s, pass_time, stage_pass, update_s
from isthmus.plan.time.stage_work import layer_work

COMPUTE_EFFICIENCY = 0.45
"""Share of a virtual chip's peak speed to which workers pad their computation."""


class SeatSeconds:
    """Seconds of stages on one kind of chip, for fixed degrees and micro-batch size."""

    def __init__(self, task: Task, spot: Spot, degrees: Degrees, micro_batch_size: int) -> None:
        self.task, self.degrees = task, degrees
        self.chip: Chip = spot.chip
        self.virtual = spot.group.virtual is not None
        self.host = Host.of(spot.group, spot.chip, task.calibration)
        self.batch = Batch(
            micro_batch_size=micro_batch_size, sequence_length=task.sequence_length, precision=task.precision
        )
        self.num_chips = degrees.tp * degrees.cp
        self._weighed: dict[int, float] = {}

    @cached_property
    def _layers(self) -> list[tuple[float, float, float]]:
        """Seconds of each layer: forward, backward, and additional backward if recomputed."""
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
        recomputed = pass_time(self.host, work, task.precision, "full")
        return plain.forward_s, plain.backward_s, recomputed.backward_s - plain.backward_s

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
        """Prefix sums over layers, shape [num_layers + 1] each: forward, backward, recomputation."""
        columns = ([one[i] for one in self._layers] for i in range(3))
        forward, backward, recomputed = ([0.0, *itertools.accumulate(column)] for column in columns)
        return forward, backward, recomputed

    @cached_property
    def message_bytes(self) -> float:
        """Bytes of one micro-batch across a stage boundary."""
        tokens = self.batch.micro_batch_size * self.batch.sequence_length
        return self.task.profile.boundary_bytes(tokens, self.batch.precision_bytes)

    @cached_property
    def shortest_layer_s(self) -> float:
        """Seconds of the fastest layer, both passes, without recomputation."""
        return min(sum(one[:2]) for one in self._layers)

    @cached_property
    def least_layer_s(self) -> float:
        """Seconds of the mean layer, both passes, without recomputation: a lower bound for any stage."""
        forward, backward, _ = self._sums
        return (forward[-1] + backward[-1]) / self.task.profile.num_layers

    def layer_s(self, other: SeatSeconds) -> float:
        """Return the least seconds of a layer, both passes, with unequal layers weighted as on `other`.

        A stage takes at least this long per mean layer of `other`, whichever layers it holds.
        """
        if self.task.equal_layers or other is self:
            return self.least_layer_s
        if id(other) not in self._weighed:
            pairs = [(sum(a[:2]), sum(b[:2])) for a, b in zip(self._layers, other._layers, strict=True)]
            self._weighed[id(other)] = min(own / its for own, its in pairs) * other.least_layer_s
        return self._weighed[id(other)]

    @cached_property
    def forward_share(self) -> tuple[float, float]:
        """Least and largest share of a pass that is forward; the largest ignores the head."""
        parts = [self._layers[index] for index in range(self.task.profile.num_layers)]
        least = min(one[0] / sum(one) for one in parts)
        most = max(one[0] / (one[0] + one[1]) for one in parts)
        start, end = self._ends
        if sum(start):
            most, least = max(most, start[0] / sum(start)), min(least, start[0] / sum(start))
        return (min(least, end[0] / sum(end)) if sum(end) else least), most

    @property
    def rest_s(self) -> float:
        """Seconds of an optimizer step independent of its parameters."""
        return 0.0 if self.virtual else self.host.rates.step_s

    @cached_property
    def start_s(self) -> float:
        """Seconds of the embedding, both passes."""
        return sum(self._ends[0])

    @cached_property
    def end_s(self) -> float:
        """Seconds of the head, both passes."""
        return sum(self._ends[1])

    def update_s(self, parameters: float, dealt: int) -> float:
        """Return the optimizer's seconds for `parameters` per chip, sharded over `dealt` chips."""
        if self.virtual:
            return 0.0
        own, each = parameters / dealt, self.batch.precision_bytes
        if self.task.optimizer_on_host:
            return self.host.rates.step_s + host_update_s(own, each)
        return self.host.rates.step_s + update_s(self.host, own, each)

    def reduce_s(self, parameters: float, dp: int, zero: Zero) -> float:
        """Return the seconds to all-reduce `parameters` gradients per chip over `dp` local replicas."""
        num_bytes = 4 * parameters * (0.75 if zero else 1.0)
        return all_reduce_s(self.host.topology, num_bytes, dp, self.num_chips)

    def last_s(self, parameters: float, dp: int, zero: Zero) -> float:
        """Return the seconds of a stage's all-reduce and update for `parameters` per chip."""
        own_s = self.update_s(parameters, dp if zero else 1)
        return own_s + (self.reduce_s(parameters, dp, zero) if dp > 1 else 0.0)
