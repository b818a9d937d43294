"""The branch-and-bound search over slots, replica groups, micro-batch sizes, schedules and layer splits.

The tree: sets of slots > partitions into replica groups > micro-batch size > schedule > a pipeline per group
(order, degrees, numbers of stages and replicas) > layers > micro-batches per replica. Branches are visited in
the order of their lower bounds (`compose` on bounds), each completely; a branch whose bound does not beat
the best layouts so far is pruned with everything below it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from isthmus.plan.search.chains.chain_shape import Cost, Shape
from isthmus.plan.search.chains.enumerate_chains import Chains
from isthmus.plan.search.chains.ranking import Bounded
from isthmus.plan.search.chains.replica_groups import Island, island_sets
from isthmus.plan.search.chains.space import MANY_CHIPS, Space
from isthmus.plan.search.compose.best_found import Found
from isthmus.plan.search.compose.branch import Branch, BranchKey
from isthmus.plan.search.compose.compose import Option, Options, compose, soonest_s
from isthmus.plan.search.compose.compose_even import compose_even
from isthmus.plan.search.compose.group_options import island_options
from isthmus.plan.search.compose.layout import Layout, deal
from isthmus.plan.search.costs.slots import Spot, flat

PATIENCE = 1500
"""In a thinned space the search stops after this many splits without a better layout."""


@dataclass
class Tally:
    """Statistics of a search: pipelines split, and pipelines or branches pruned by a bound."""

    evaluated: int = 0
    pruned: int = 0
    # Whether `go_on` ended the search.
    stopped: bool = False


@dataclass
class Explorer:
    """One search.

    In a thinned space it stops after `PATIENCE` splits without a better layout; the limit is a count, so that
    results are deterministic.
    """

    space: Space
    samples: int
    asked_size: int
    found: Found = field(default_factory=Found)
    # Called with (stats, best layout) after each evaluated option; False stops the search.
    go_on: Callable[[Tally, Layout | None], bool] = lambda *_: True
    tally: Tally = field(default_factory=Tally)
    # Whether links may set the pace.
    link_bound: bool = True
    # The only branches to search; None: all.
    near: frozenset[BranchKey] | None = None
    _options: dict[tuple[object, ...], Options] = field(default_factory=dict)
    _chains: dict[tuple[object, ...], Chains] = field(default_factory=dict)
    _alone: dict[tuple[Bounded, str], Option] = field(default_factory=dict)
    # Value of `tally.evaluated` when the best layout last improved.
    _better_at: int = 0

    def run(self, spots: Sequence[Spot]) -> list[Layout]:
        """Search, and return the best `width` layouts and the best of each set of clusters, best first.

        Sets of single-slot groups come first: they are few, and their layouts prune the longer pipelines.
        """
        sets = list(island_sets(spots, self.space))
        singles = [one for one in sets if all(len(replica_group) == 1 for replica_group in one)]
        chains = [one for one in sets if any(len(replica_group) > 1 for replica_group in one)]
        for some in (singles, chains):
            self._better_at = self.tally.evaluated
            for branch in sorted(self._branches(some), key=lambda one: one.promise_s):
                if self._ends():
                    break
                self._visit(branch)
            if self.tally.stopped:
                break
        return self.found.layouts

    def anew(self, space: Space, found: Found, near: frozenset[BranchKey] | None) -> Explorer:
        """Return the same search for another space."""
        return replace(self, space=space, found=found, near=near, _options={}, _chains={}, _alone={})

    def forget(self) -> None:
        """Clear the caches of pipelines, which are large; the layouts found stay."""
        for known in (self._options, self._chains, self._alone):
            known.clear()

    def _ends(self) -> bool:
        """Return whether the search was stopped or has gone too long without a better layout."""
        exhausted = not self.space.whole and self.tally.evaluated - self._better_at > PATIENCE
        return self.tally.stopped or exhausted

    def _branches(self, sets: Sequence[tuple[Island, ...]]) -> Iterator[Branch]:
        for replica_groups, schedule, ring in self._parted(sets):
            for size in self.space.micro_batch_sizes(self.asked_size, self.samples):
                if self._left_out(replica_groups, size, schedule):
                    continue
                bound_s = self._promise_s(replica_groups, size, schedule, ring)
                if bound_s < self.found.limit_s:
                    yield Branch(replica_groups, size, schedule, ring, bound_s)
                elif bound_s < math.inf:
                    self.tally.pruned += 1

    def _parted(self, sets: Sequence[tuple[Island, ...]]) -> Iterator[tuple[tuple[Island, ...], str, float]]:
        """Yield feasible sets of replica groups with each schedule and the seconds of their ring."""
        space = self.space
        for replica_groups in sets:
            ring = space.ring_s(replica_groups)
            if ring == math.inf or (len(replica_groups) > 1 and space.limits.dp):
                continue  # a fixed dp applies to one pipeline
            if ring >= self.found.limit_s:
                self.tally.pruned += 1
                continue
            all_spots = list(itertools.chain(*replica_groups))
            if not space.limits.mixed_chips and len({s.group.chip for s in all_spots}) > 1:
                continue
            for schedule in space.schedules(all_spots):
                yield replica_groups, schedule, ring

    def _left_out(self, islands: Sequence[Island], size: int, schedule: str) -> bool:
        """Return whether a warm start excludes a branch."""
        names = frozenset(
            frozenset((s.cluster, s.group.name) for s in flat(replica_group)) for replica_group in islands
        )
        return self.near is not None and (names, size, schedule) not in self.near

    def _promise_s(self, islands: Sequence[Island], size: int, schedule: str, ring_s: float) -> float:
        """Return a lower bound on a branch; infinite if it is empty."""
        if len(islands) == 1:
            return next(self._chains_of(islands[0], size).by_end(self.found.limit_s), (math.inf, None))[0]
        options, total = self._options_of(islands, size, schedule), self.samples // size
        if not all(options):
            return math.inf
        if not self.space.limits.even_batches:
            return ring_s + soonest_s(options, total, 0.0, self.found.limit_s - ring_s)
        found = compose_even(options, total, lambda *_: False, 0.0)
        return ring_s + (found if isinstance(found, float) else found[0])

    @property
    def _compose(self) -> Callable[..., tuple[float, tuple[Option, ...]] | float]:
        return compose_even if self.space.limits.even_batches else compose

    def _chains_of(self, island: Island, size: int, coarse: bool = False) -> Chains:
        """Return the pipelines of a replica group; equal groups share them."""
        island = _sorted(island)
        key = (size, coarse, *self.space.alike(island))
        if key not in self._chains:
            self._chains[key] = self.space.chains(island, size, self.samples // size, coarse)
        return self._chains[key]

    def _options_of(self, islands: Sequence[Island], size: int, schedule: str) -> list[Options]:
        """Return the options of each of several replica groups."""
        found = []
        for replica_group in islands:
            coarse = len(replica_group) > 1 and sum(slot.chips for slot in replica_group) > MANY_CHIPS
            chains = self._chains_of(replica_group, size, coarse)
            key = (id(chains), schedule)
            if key not in self._options:
                best_s = math.inf if self.found.best is None else self.found.best.estimate_s
                self._options[key] = island_options(chains, schedule, best_s)
                self.space.thinned = self.space.thinned or self._options[key].more
            found.append(self._options[key])
        return found

    def _visit(self, branch: Branch) -> None:
        if branch.promise_s >= self.found.limit_s:
            self.tally.pruned += 1
            return
        if len(branch.islands) == 1:
            self._visit_single(branch)
            return
        options = self._options_of(branch.islands, branch.micro_batch_size, branch.schedule)
        total = self.samples // branch.micro_batch_size
        answer = self._compose(options, total, self._cut, self.found.limit_s - branch.ring_s)
        if isinstance(answer, float) or self.tally.stopped:
            self.tally.pruned += 1
            return
        chosen = []
        for option, replica_group in zip(answer[1], branch.islands, strict=True):
            if option.chain is not None:
                chosen.append((self._placed(option, replica_group), option.chain))
        if branch.schedule == "overlapped" and len({shape.num_stages for shape, _ in chosen}) > 1:
            return  # all replicas of a plan share one warm-up
        even = self.space.limits.even_batches
        self._keep(deal(chosen, total, branch.micro_batch_size, branch.ring_s, even))

    def _visit_single(self, branch: Branch) -> None:
        """Split the pipelines of one replica group in the order of their bounds, until none can improve."""
        chains = self._chains_of(branch.islands[0], branch.micro_batch_size)
        total, ranking = chains.micro_batches, chains.by_end(self.found.limit_s)
        for least_s, one in ranking:
            if least_s >= self.found.limit_s:
                self.tally.pruned += ranking.left + 1
                return
            option = self._alone.get((one, branch.schedule))
            if option is None:
                option = Option(one.made(branch.schedule), Cost(one.first_s, one.pace_s), chains.island)
                self._alone[one, branch.schedule] = option
            if self._cut_below(option, -(-total // one.dp)) and option.chain is not None:
                shape = self._placed(option, branch.islands[0])
                self._keep(deal([(shape, option.chain)], total, branch.micro_batch_size, 0.0))
            if self._ends():
                return
        self.tally.pruned += ranking.left

    def _placed(self, option: Option, island: Island) -> Shape:
        """Return the shape at the slots of this replica group if it was made for an equal one."""
        there, here = option.island, _sorted(island)
        if all(a is b for a, b in zip(there, here, strict=True)):
            return option.shape
        moved = dict(zip(map(id, there), here, strict=True))
        segments = [one._replace(spot=moved[id(one.spot)]) for one in option.shape.segments]
        return self.space.shape(segments, option.shape.dp, option.shape.schedule)

    def _cut_below(self, option: Option, micro_batches: int) -> bool:
        """Evaluate an option of a group that trains alone, unless a tighter bound prunes it."""
        while not option.cut:
            if not self._cut(option, micro_batches):
                option.cut = True  # no better evaluation exists
                return False
            least_s = option.cost.first_s + (micro_batches - 1) * option.cost.pace_s
            if not option.cut and least_s >= self.found.limit_s:
                self.tally.pruned += 1
                return False
        return True

    def _cut(self, option: Option, micro_batches: int) -> bool:
        """Evaluate an option and count it; False if it is infeasible or violates `link_bound`.

        For unequal layers, whose splits are slow, a first call only tightens the bound.
        """
        if not option.weighed and not self.space.task.equal_layers:
            option.weighed = True
            costs = [cost for one in option.shape.variants if (cost := one.outlook(micro_batches))]
            if costs:
                option.cost = Cost(min(one.first_s for one in costs), min(one.pace_s for one in costs))
            return bool(costs)
        best_s, best = math.inf, None
        for shape in option.shape.variants:
            self.tally.evaluated += 1
            chain = shape.cut(micro_batches)
            if chain is None or (chain.link_bound and not self.link_bound):
                continue
            time_s = chain.cost.first_s + (micro_batches - 1) * chain.cost.pace_s
            if time_s < best_s:
                best_s, best = time_s, (shape, chain)
        if not self.go_on(self.tally, self.found.best):
            self.tally.stopped = True
        if best is None:
            return False
        option.shape, option.chain = best
        option.cost, option.cut = best[1].cost, True
        return True

    def _keep(self, layout: Layout | None) -> None:
        """Keep a layout, unless it exceeds the allowed chips or violates `link_bound`."""
        most = self.space.limits.max_chips
        if layout is None or (most and layout.num_chips > most):
            return
        if self.link_bound or not layout.link_bound:
            before = self.found.best
            self.found.keep(layout)
            if self.found.best is not before:
                self._better_at = self.tally.evaluated


def _sorted(island: Island) -> Island:
    """Return the slots of a replica group by kind, so that equal groups match."""
    return tuple(sorted(island, key=lambda slot: repr(slot.kind)))
