"""`MixedSizeSearch`: continues the search with a micro-batch size per replica group.

Chips with much memory, or slow on small matrix products, may gain from larger micro-batches than others. The
search tree is that of `BranchAndBound`, but a group's options cover all sizes, and their work is counted in
samples. `distribute_samples` then distributes the samples exactly; the composition ignores that a remainder of
samples may fit no size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from isthmus.plan.search.bound.relaxations import no_wait_s
from isthmus.plan.search.compose.compose_groups import PipelineOption, compose_lazily, earliest_end_s
from isthmus.plan.search.compose.joined_node_groups import joined_ring_s
from isthmus.plan.search.compose.plan_layout import PlacedPipeline, PlanLayout, expand_pools
from isthmus.plan.search.compose.runner_ups import runner_ups
from isthmus.plan.search.compose.search_branch import SearchBranch
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape, PipelineSplit
from isthmus.plan.search.pipelines.replica_groups import ReplicaGroup
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming
from isthmus.plan.search.splits.distribute_samples import SizedReplicas, distribute_samples


@dataclass(frozen=True, eq=False)
class MixedSizeOption:
    """An option of a replica group with `micro_batch_size` samples per micro-batch."""

    option: PipelineOption
    micro_batch_size: int

    @property
    def exact(self) -> bool:
        """Whether its cost is exact."""
        return self.option.exact

    def work_within(self, time_s: float) -> int:
        """Return the samples that its replicas finish within `time_s`."""
        return self.micro_batch_size * self.option.work_within(time_s)


@dataclass
class MixedSizeSearch(BranchAndBound):
    """A search that continues after another: its layouts are kept, and prune."""

    @classmethod
    def continue_from(cls, search: BranchAndBound) -> MixedSizeSearch:
        """Return the search that continues after `search`."""
        return cls(**{one.name: getattr(search, one.name) for one in fields(BranchAndBound)})

    def _branches(self, sets: Sequence[tuple[ReplicaGroup, ...]]) -> Iterator[SearchBranch]:
        sizes = self._sizes()
        for replica_groups, schedule, ring_s in self._candidate_groups(sets):
            if len(replica_groups) < 2 or len(sizes) < 2 or self._is_excluded(replica_groups, 0, schedule):
                continue
            slots = list(itertools.chain(*replica_groups))
            relaxed = [self._relaxations[size] for size in sizes]
            bound_s = ring_s + no_wait_s(relaxed, slots, self.samples) * (1 - 1e-9)
            yield SearchBranch(replica_groups, 0, schedule, ring_s, bound_s)

    def _tight_bound_s(self, branch: SearchBranch, _up_to_s: float) -> tuple[float, bool]:
        options, ring_s = self._sized_options(branch.replica_groups, branch.schedule), branch.ring_s
        if not all(options):
            return math.inf, True
        return ring_s + earliest_samples_s(options, self.samples, 0.0, self._cutoff_s(branch) - ring_s), True

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes that may be mixed: powers of two; none with `equal_micro_batches`."""
        if self.space.limits.even_replicas:
            return ()
        sizes = self.space.micro_batch_sizes(self.requested_size, self.samples)
        return tuple(size for size in sizes if size & (size - 1) == 0)

    def _sized_options(self, replica_groups: Sequence[ReplicaGroup], schedule: str) -> list[list[MixedSizeOption]]:
        """Return the options of all sizes for each replica group."""
        sizes = self._sizes()
        by_size = [self._options_of(replica_groups, size, schedule) for size in sizes]
        return [
            [MixedSizeOption(one, size) for size, options in zip(sizes, each, strict=True) for one in options]
            for each in zip(*by_size, strict=True)
        ]

    def _visit(self, branch: SearchBranch) -> None:
        def cut(one: MixedSizeOption, samples: int) -> bool:
            return self._evaluate(one.option, max(1, samples // (one.micro_batch_size * one.option.shape.dp)))

        def compose(some: Sequence[list[MixedSizeOption]]) -> tuple[float, tuple[MixedSizeOption, ...]] | float:
            return compose_samples(some, self.samples, cut, self._cutoff_s(branch) - branch.ring_s)

        def layout_of(chosen: Sequence[tuple[PipelineShape, PipelineSplit]]) -> PlanLayout | None:
            return make_mixed_size_layout(chosen, self.samples, branch.ring_s)

        options = self._sized_options(branch.replica_groups, branch.schedule)
        found = runner_ups(options, compose, lambda some, keep: [one for one in some if keep(one)])
        self._keep_compositions(
            branch, ((time_s, [one.option for one in answer]) for time_s, answer in found), layout_of
        )


def compose_samples(
    replica_groups: Sequence[list[MixedSizeOption]],
    samples: int,
    evaluate: Callable[[MixedSizeOption, int], bool],
    cutoff_s: float,
) -> tuple[float, tuple[MixedSizeOption, ...]] | float:
    """Return the seconds and the option per replica group with which `samples` finish first.

    As `compose`, but counted in samples: lazily exact; only a proven lower bound if no combination is
    feasible or finishes before `cutoff_s`. Infeasible options are removed.
    """

    def cut_one(one: MixedSizeOption, time_s: float) -> bool:
        return evaluate(one, one.work_within(time_s))

    return compose_lazily(
        replica_groups,
        lambda from_s: earliest_samples_s(replica_groups, samples, from_s, cutoff_s),
        cut_one, list.remove, cutoff_s,
    )  # fmt: skip


def earliest_samples_s(
    replica_groups: Sequence[Sequence[MixedSizeOption]], samples: int, from_s: float, cutoff_s: float
) -> float:
    """Return the least time, in [from_s, give_up_s], in which the best options finish `samples`."""
    rows = []
    for options in replica_groups:
        costs = ((one.micro_batch_size * one.option.shape.dp, one.option.cost) for one in options)
        rows.append((1, [(each, cost.first_s, cost.interval_s) for each, cost in costs]))
    return earliest_end_s(rows, samples, from_s, cutoff_s)


def make_mixed_size_layout(
    chosen: Sequence[tuple[PipelineShape, PipelineSplit]], samples: int, ring_s: float
) -> PlanLayout | None:
    """Return the layout of pipelines with mixed micro-batch sizes; None if sizes are equal or none fit."""
    chosen = expand_pools(chosen)
    kinds = [
        SizedReplicas(ReplicaTiming(chain.cost.first_s, chain.cost.interval_s, shape.dp), shape.micro_batch_size)
        for shape, chain in chosen
    ]
    sizes = {one.micro_batch_size for one in kinds}
    counts = distribute_samples(kinds, samples) if len(sizes) > 1 else None
    if counts is None:
        return None
    rows = tuple(PlacedPipeline(shape, chain, row) for (shape, chain), row in zip(chosen, counts, strict=True))
    return PlanLayout(rows, max(sizes), chosen[0][0].schedule, joined_ring_s(chosen, ring_s))
