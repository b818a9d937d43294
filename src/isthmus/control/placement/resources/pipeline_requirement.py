"""`PipelineRequirement`: the needs of equal pipelines by stage: devices per node, storage, WAN.

Cross-domain pooling report 4.2.3 (1): tensor parallelism stays within a node, data parallelism within a
cluster, the pipeline crosses the WAN. Nodes are counted by their free devices, as in its table 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from isthmus.core.errors import PlanError

StageSize = tuple[str, int]
"""(kind of chip, devices that a stage takes on one node)."""


class StageRange(NamedTuple):
    """Pipeline stages `[first, last)` at one cluster."""

    first: int
    last: int
    cluster: str


@dataclass(frozen=True, kw_only=True)
class StageRequirement:
    """One stage of one pipeline: `num_devices` devices of kind `chip` on one node with `devices_per_node`."""

    chip: str
    num_devices: int
    devices_per_node: int
    # Checkpoints stored at its cluster while the job runs there.
    checkpoint_bytes: int = 0
    # Files of its weights: those it starts from and the result.
    model_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class WanRequirement:
    """What all pipelines need of a WAN link at a stage boundary, in each direction."""

    # Bandwidth, with headers.
    gbps: float
    # Longest one-way delay that the schedule tolerates.
    delay_s: float
    # Largest tolerated standard deviation of the delay.
    jitter_s: float


@dataclass(frozen=True, kw_only=True)
class PipelineRequirement:
    """The needs of `num_pipelines` equal pipelines.

    Raises `PlanError` if the device counts of stages on one kind of chip do not divide one another.
    """

    stages: tuple[StageRequirement, ...]
    # Number of equal pipelines.
    num_pipelines: int = 1
    # `boundaries[i]` lies between stages `i` and `i + 1`.
    boundaries: tuple[WanRequirement, ...] = ()
    # Stored at every cluster with a first stage (tokens) or last stage (labels).
    data_bytes: int = 0

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.stages) - 1:
            raise PlanError(
                f"{len(self.boundaries)} boundaries do not join {len(self.stages)} stages",
                hint="give one boundary between each two neighbouring stages",
            )
        for (chip, more), (other, fewer) in itertools.pairwise(self.sizes):
            if chip == other and more % fewer:
                raise PlanError(
                    f"stages of {more} and of {fewer} devices on {chip}: neither divides the other",
                    hint="use degrees that divide one another for all stages on one kind of chip",
                )

    @property
    def num_stages(self) -> int:
        """Number of stages of one pipeline."""
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        """Devices of all pipelines."""
        return self.num_pipelines * sum(stage.num_devices for stage in self.stages)

    @cached_property
    def chips(self) -> tuple[str, ...]:
        """The kinds of chips, each once."""
        return tuple(dict.fromkeys(stage.chip for stage in self.stages))

    @cached_property
    def sizes(self) -> tuple[StageSize, ...]:
        """The distinct stage sizes, by kind of chip, largest first."""
        return tuple(sorted({(s.chip, s.num_devices) for s in self.stages}, key=lambda one: (one[0], -one[1])))

    @cached_property
    def counts_before(self) -> tuple[tuple[int, ...], ...]:
        """For every position, the stages of each size before it; shape (num_stages + 1, num_sizes)."""
        rows, row = [(0,) * len(self.sizes)], [0] * len(self.sizes)
        for stage in self.stages:
            row[self.sizes.index((stage.chip, stage.num_devices))] += 1
            rows.append(tuple(row))
        return tuple(rows)

    def count_by_size(self, first: int, last: int) -> tuple[int, ...]:
        """Return the number of stages of each size among stages `[first, last)`."""
        pairs = zip(self.counts_before[last], self.counts_before[first], strict=True)
        return tuple(b - a for b, a in pairs)

    @cached_property
    def _bytes_before(self) -> tuple[int, ...]:
        each = (stage.checkpoint_bytes + stage.model_bytes for stage in self.stages)
        return tuple(itertools.accumulate(each, initial=0))

    def storage_bytes(self, ranges: Sequence[tuple[int, int]], *, has_data: bool = False) -> int:
        """Return the bytes that a cluster with these ranges `[first, last)` of stages stores.

        `has_data`: the data set is already counted there for other pipelines of the job.
        """
        own = sum(self._bytes_before[last] - self._bytes_before[first] for first, last in ranges)
        return own + (self.data_bytes if self.reads_data(ranges) and not has_data else 0)

    def reads_data(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether the first or the last stage is in one of these ranges `[first, last)`."""
        return any(first == 0 or last == self.num_stages for first, last in ranges)
