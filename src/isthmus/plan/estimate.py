"""What one candidate costs: seconds and bytes per stage, the pace of the pipeline, the WAN it needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isthmus.core.chip import Precision
from isthmus.core.job import Job
from isthmus.core.link_physics import effective_bytes_per_s
from isthmus.core.plan import StageTime
from isthmus.core.pool import Link, Pool
from isthmus.plan.candidates import Device
from isthmus.plan.memory import StageMemory, stage_memory
from isthmus.plan.profile import ModelProfile
from isthmus.sim import Wire

COMPUTE_EFFICIENCY = 0.45
"""Share of a chip's peak that a transformer's matrix products reach, where nothing was measured."""

MEMORY_FRACTION = 0.95
"""Share of a chip's memory that a stage may plan to fill."""


@dataclass(frozen=True)
class Workload:
    """The job's model and batch, with every cost that depends on nothing else cached."""

    job: Job
    profile: ModelProfile

    @property
    def precision(self) -> Precision:
        """Precision of the computation."""
        return self.job.training.precision

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.job.training.micro_batch_size * self.job.training.sequence_length

    @cached_property
    def message_bytes(self) -> float:
        """Bytes that one micro-batch carries over a stage boundary, each way."""
        return float(self.profile.boundary_bytes(self.tokens, 2 if self.precision == "bf16" else 4))

    @cached_property
    def _layer_flops(self) -> list[float]:
        """Prefix sums of the forward FLOPs of the decoder layers, for one micro-batch."""
        sequence = self.job.training.sequence_length
        each = (layer.forward_flops(sequence, self.tokens) for layer in self.profile.layers)
        return [0.0, *itertools.accumulate(each)]

    def stage_time(self, device: Device, first: int, last: int, *, is_last: bool) -> StageTime:
        """Return the seconds of one micro-batch of layers `[first, last)` (and the head) on `device`.

        The backward pass costs twice the forward one: a product for the input's gradient, one for the
        weight's.
        """
        flops = self._layer_flops[last] - self._layer_flops[first]
        if is_last:
            flops += self.profile.head.forward_flops(self.job.training.sequence_length, self.tokens)
        forward_s = flops / (device.chip.flop_per_s(self.precision) * COMPUTE_EFFICIENCY)
        return StageTime(forward_s=forward_s, backward_s=2 * forward_s)

    def memory(self, first: int, last: int, *, is_first: bool, is_last: bool, in_flight: int) -> StageMemory:
        """Return what layers `[first, last)` keep on a chip with `in_flight` micro-batches under way."""
        return stage_memory(
            self.profile,
            (first, last),
            is_first=is_first,
            is_last=is_last,
            micro_batch_size=self.job.training.micro_batch_size,
            sequence_length=self.job.training.sequence_length,
            in_flight=in_flight,
            precision=self.job.training.precision,
        )


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A stage boundary between two clusters: the stage before it, and the link each way."""

    stage: int
    out: Link
    back: Link


def crossings(pool: Pool, devices: Sequence[Device]) -> tuple[Crossing, ...] | tuple[str, str]:
    """Return the boundaries of a chain that cross the WAN, or the first pair of clusters that no link
    joins."""
    found = []
    for stage, (a, b) in enumerate(itertools.pairwise(devices)):
        if a.cluster == b.cluster:
            continue
        out, back = pool.link(a.cluster, b.cluster), pool.link(b.cluster, a.cluster)
        if out is None or back is None:
            return (a.cluster, b.cluster) if out is None else (b.cluster, a.cluster)
        found.append(Crossing(stage=stage, out=out, back=back))
    return tuple(found)


def wires(hops: Sequence[Crossing]) -> dict[tuple[int, int], Wire]:
    """Return the wires of a chain's crossings, as the simulator takes them."""
    result = {}
    for hop in hops:
        for ends, link, other in (
            ((hop.stage, hop.stage + 1), hop.out, hop.back),
            ((hop.stage + 1, hop.stage), hop.back, hop.out),
        ):
            result[ends] = Wire(
                name=f"{link.source}>{link.target}",
                bytes_per_s=effective_bytes_per_s(link, other),
                delay_s=link.delay_s,
            )
    return result


def cycle_s(times: Sequence[StageTime], hop_s: Sequence[float]) -> float:
    """Return a lower bound on the pace of 1F1B, seconds per micro-batch.

    Stage `i` of `S` has `S - i` micro-batches under way, and each comes back only after it has been through
    all later stages: so the pace is bounded by the slowest stage and by that round trip over its number in
    flight. `hop_s` is the time of one exchange at each boundary (0 inside a cluster).
    """
    count = len(times)
    pace_s, later_s = 0.0, 0.0
    for i in reversed(range(count)):
        own_s = times[i].forward_s + times[i].backward_s
        later_s += own_s + (2 * hop_s[i] if i < count - 1 else 0.0)
        pace_s = max(pace_s, own_s, later_s / (count - i))
    return pace_s


def iteration_estimate_s(times: Sequence[StageTime], hop_s: Sequence[float], micro_batches: int) -> float:
    """Return a quick estimate of a 1F1B step, used to rank candidates before they are simulated."""
    round_s = sum(t.forward_s + t.backward_s for t in times) + 2 * sum(hop_s)
    return round_s + (micro_batches - 1) * cycle_s(times, hop_s)
