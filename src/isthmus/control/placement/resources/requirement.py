"""`Requirement`: what a job needs of any place, stage by stage: cards on nodes, bytes of storage, WAN.

Cross-domain pooling report 4.2.3 (1): tensor parallelism stays within a node, data parallelism within a
cluster, the pipeline crosses the WAN. Nodes are counted by their free cards, as in its table 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from isthmus.core.errors import PlanError

Size = tuple[str, int]
"""A kind of chip, and how many cards of one node a stage takes."""


class Range(NamedTuple):
    """Pipeline stages `[first, last)`, all at one cluster."""

    first: int
    last: int
    cluster: str


@dataclass(frozen=True, kw_only=True)
class StageNeed:
    """One pipeline stage of one pipeline: `cards` of kind `chip` on one node of `cards_per_node`.

    `checkpoint_bytes` are kept at its cluster while the job runs there, `model_bytes` are the files that its
    weights are read from.
    """

    chip: str
    cards: int
    cards_per_node: int
    checkpoint_bytes: int = 0
    model_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class WanNeed:
    """What all pipelines need of a stage boundary that crosses the WAN, each way: `<d x bandwidth, ...>`.

    `gbps` counts headers. `delay_s` is the longest one-way delay that the schedule tolerates, `jitter_s` the
    largest standard deviation of it.
    """

    gbps: float
    delay_s: float
    jitter_s: float


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A job as placement sees it: `pipelines` equal pipelines over `stages`, joined at `boundaries`.

    `boundaries[i]` lies between stages `i` and `i + 1`. `data_bytes` are stored wherever the first or the
    last stage is (tokens and labels). Raises `PlanError` where stages on one kind of chip take numbers of
    cards that do not divide one another.
    """

    stages: tuple[StageNeed, ...]
    pipelines: int = 1
    boundaries: tuple[WanNeed, ...] = ()
    data_bytes: int = 0

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.stages) - 1:
            raise PlanError(
                f"{len(self.boundaries)} boundaries do not join {len(self.stages)} stages",
                hint="give one between each two neighbours",
            )
        for (chip, more), (other, fewer) in itertools.pairwise(self.sizes):
            if chip == other and more % fewer:
                raise PlanError(
                    f"stages of {more} and of {fewer} cards on {chip}: neither divides the other",
                    hint="give all stages on one kind of chip degrees that divide one another",
                )

    @property
    def num_stages(self) -> int:
        """Stages of one pipeline."""
        return len(self.stages)

    @property
    def num_cards(self) -> int:
        """Cards of all pipelines."""
        return self.pipelines * sum(stage.cards for stage in self.stages)

    @cached_property
    def chips(self) -> tuple[str, ...]:
        """The kinds of chips, each once."""
        return tuple(dict.fromkeys(stage.chip for stage in self.stages))

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The distinct sizes of stages, by kind of chip, the largest first."""
        return tuple(sorted({(s.chip, s.cards) for s in self.stages}, key=lambda one: (one[0], -one[1])))

    @cached_property
    def counts_before(self) -> tuple[tuple[int, ...], ...]:
        """For every position, the stages of each size before it (one row more than stages)."""
        rows, row = [(0,) * len(self.sizes)], [0] * len(self.sizes)
        for stage in self.stages:
            row[self.sizes.index((stage.chip, stage.cards))] += 1
            rows.append(tuple(row))
        return tuple(rows)

    def counts(self, first: int, last: int) -> tuple[int, ...]:
        """Return the stages of each size among stages `[first, last)`."""
        pairs = zip(self.counts_before[last], self.counts_before[first], strict=True)
        return tuple(b - a for b, a in pairs)

    @cached_property
    def _bytes_before(self) -> tuple[int, ...]:
        each = (stage.checkpoint_bytes + stage.model_bytes for stage in self.stages)
        return tuple(itertools.accumulate(each, initial=0))

    def storage_bytes(self, ranges: Sequence[tuple[int, int]], *, has_data: bool = False) -> int:
        """Return what a cluster stores more that has these ranges `[first, last)` of stages.

        `has_data`: other pipelines of the job have brought its data set there.
        """
        own = sum(self._bytes_before[last] - self._bytes_before[first] for first, last in ranges)
        return own + (self.data_bytes if self.reads_data(ranges) and not has_data else 0)

    def reads_data(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Tell whether the first or the last stage is in one of these ranges `[first, last)`."""
        return any(first == 0 or last == self.num_stages for first, last in ranges)
