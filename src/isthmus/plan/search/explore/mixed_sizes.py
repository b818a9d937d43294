"""`UnlikeSizes`: continues the search with a micro-batch size per replica group.

Chips with much memory, or slow on small matrix products, may gain from larger micro-batches than others. The
search tree is that of `Explorer`, but a group's options cover all sizes, and their work is counted in
samples. `deal_samples` then distributes the samples exactly; the composition ignores that a remainder of
samples may fit no size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from isthmus.plan.search.chains.chain_shape import Chain, Shape
from isthmus.plan.search.chains.replica_groups import Island
from isthmus.plan.search.compose.branch import Branch
from isthmus.plan.search.compose.compose import Option, earliest_s, settle
from isthmus.plan.search.compose.layout import Layout, Row, placed
from isthmus.plan.search.explore.branch_and_bound import Explorer
from isthmus.plan.search.splits.deal_micro_batches import Pace
from isthmus.plan.search.splits.deal_samples import Sized, deal_samples


@dataclass(frozen=True, eq=False)
class SizedOption:
    """An option of a replica group with `size` samples per micro-batch."""

    option: Option
    size: int

    @property
    def cut(self) -> bool:
        """Whether its cost is exact."""
        return self.option.cut

    def taken(self, time_s: float) -> int:
        """Return the samples that its replicas finish within `time_s`."""
        return self.size * self.option.taken(time_s)


@dataclass
class UnlikeSizes(Explorer):
    """A search that continues after another: its layouts are kept, and prune."""

    @classmethod
    def after(cls, explorer: Explorer) -> UnlikeSizes:
        """Return the search that continues after `explorer`."""
        return cls(**{one.name: getattr(explorer, one.name) for one in fields(Explorer)})

    def _branches(self, sets: Sequence[tuple[Island, ...]]) -> Iterator[Branch]:
        sizes = self._sizes()
        for replica_groups, schedule, ring_s in self._parted(sets):
            if len(replica_groups) < 2 or len(sizes) < 2 or self._left_out(replica_groups, 0, schedule):
                continue
            options, bound_s = self._sized(replica_groups, schedule), math.inf
            if all(options):
                bound_s = ring_s + soonest_s(options, self.samples, 0.0, self.found.limit_s - ring_s)
            if bound_s < self.found.limit_s:
                yield Branch(replica_groups, 0, schedule, ring_s, bound_s)
            else:
                self.tally.pruned += 1

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes that may be mixed: powers of two; none with `even_batches`."""
        if self.space.limits.even_batches:
            return ()
        sizes = self.space.micro_batch_sizes(self.asked_size, self.samples)
        return tuple(size for size in sizes if size & (size - 1) == 0)

    def _sized(self, islands: Sequence[Island], schedule: str) -> list[list[SizedOption]]:
        """Return the options of all sizes for each replica group."""
        sizes = self._sizes()
        by_size = [self._options_of(islands, size, schedule) for size in sizes]
        return [
            [SizedOption(one, size) for size, options in zip(sizes, each, strict=True) for one in options]
            for each in zip(*by_size, strict=True)
        ]

    def _visit(self, branch: Branch) -> None:
        if branch.promise_s >= self.found.limit_s:
            self.tally.pruned += 1
            return

        def cut(one: SizedOption, samples: int) -> bool:
            return self._cut(one.option, max(1, samples // (one.size * one.option.shape.dp)))

        options = self._sized(branch.islands, branch.schedule)
        answer = compose_samples(options, self.samples, cut, self.found.limit_s - branch.ring_s)
        if isinstance(answer, float) or self.tally.stopped:
            self.tally.pruned += 1
            return
        chosen = [
            (self._placed(one.option, replica_group), one.option.chain)
            for one, replica_group in zip(answer, branch.islands, strict=True)
            if one.option.chain is not None
        ]
        if branch.schedule == "overlapped" and len({shape.num_stages for shape, _ in chosen}) > 1:
            return  # all replicas of a plan share one warm-up
        self._keep(deal_unlike(chosen, self.samples, branch.ring_s))


def compose_samples(
    islands: Sequence[list[SizedOption]],
    samples: int,
    cut: Callable[[SizedOption, int], bool],
    give_up_s: float,
) -> tuple[SizedOption, ...] | float:
    """Return the option per replica group with which `samples` finish first.

    As `compose`, but counted in samples: lazily exact; only a proven lower bound if no combination is
    feasible or finishes before `give_up_s`. Infeasible options are removed.
    """

    def cut_one(one: SizedOption, time_s: float) -> bool:
        return cut(one, one.taken(time_s))

    found = settle(
        islands,
        lambda from_s: soonest_s(islands, samples, from_s, give_up_s),
        cut_one, list.remove, give_up_s,
    )  # fmt: skip
    return found if isinstance(found, float) else found[1]


def soonest_s(
    islands: Sequence[Sequence[SizedOption]], samples: int, from_s: float, give_up_s: float
) -> float:
    """Return the least time, in [from_s, give_up_s], in which the best options finish `samples`."""
    rows = []
    for options in islands:
        costs = ((one.size * one.option.shape.dp, one.option.cost) for one in options)
        rows.append((1, [(each, cost.first_s, cost.pace_s) for each, cost in costs]))
    return earliest_s(rows, samples, from_s, give_up_s)


def deal_unlike(chosen: Sequence[tuple[Shape, Chain]], samples: int, ring_s: float) -> Layout | None:
    """Return the layout of pipelines with mixed micro-batch sizes; None if sizes are equal or none fit."""
    chosen = placed(chosen)
    kinds = [
        Sized(Pace(chain.cost.first_s, chain.cost.pace_s, shape.dp), shape.micro_batch_size)
        for shape, chain in chosen
    ]
    sizes = {one.size for one in kinds}
    counts = deal_samples(kinds, samples) if len(sizes) > 1 else None
    if counts is None:
        return None
    rows = tuple(Row(shape, chain, row) for (shape, chain), row in zip(chosen, counts, strict=True))
    return Layout(rows, max(sizes), chosen[0][0].schedule, ring_s)
