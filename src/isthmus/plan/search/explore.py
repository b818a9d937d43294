"""`explore`: the search. Which spots, in which islands, with which micro-batch and schedule, cut how.

The tree: sets of spots > partitions into islands > micro-batch size > schedule > a chain per island (order,
cuts, numbers of stages and replicas) > layers > micro-batches per replica. Branches are visited in the order
of what they promise (`compose` on bounds), each depth first to its end; one whose promise is no better than
the best layouts found so far is pruned with everything below it.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from isthmus.plan.search.compose import Option, Options, compose
from isthmus.plan.search.even import compose_even
from isthmus.plan.search.islands import Island, island_sets
from isthmus.plan.search.layout import Layout, deal
from isthmus.plan.search.shape import Cost, Shape
from isthmus.plan.search.space import MANY_CHIPS, Space
from isthmus.plan.search.spots import Spot, flat

OPEN, ALL = 32, 1 << 30
"""Options of an island that are compared at once: with those of others, and where it trains alone."""


@dataclass
class Tally:
    """What the search has done: chains cut, chains pruned by their bound, branches closed unopened."""

    evaluated: int = 0
    pruned: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class Branch:
    """Islands, a micro-batch size (0: unlike ones), a schedule, and the least seconds that they promise."""

    islands: tuple[Island, ...]
    micro_batch_size: int
    schedule: str
    ring_s: float
    promise_s: float


BranchKey = tuple[frozenset[frozenset[tuple[str, str]]], int, str]
"""A branch by names: islands of (cluster, node group), micro-batch size (0: unlike ones), schedule."""


def branch_of(layout: Layout) -> BranchKey:
    """Return the branch that a layout was found on."""
    islands = (
        frozenset((one.spot.cluster, one.spot.group.name) for one in row.shape.segments)
        for row in layout.rows
    )
    return frozenset(islands), 0 if layout.unlike_sizes else layout.micro_batch_size, layout.schedule


@dataclass
class Explorer:
    """One search. `go_on(tally, best)` is asked at every chain; False ends the search with what there is.

    `near` keeps the search to these branches.
    """

    space: Space
    samples: int
    asked_size: int
    width: int = 8
    go_on: Callable[[Tally, Layout | None], bool] = lambda *_: True
    tally: Tally = field(default_factory=Tally)
    link_bound: bool = True
    near: frozenset[BranchKey] | None = None
    _options: dict[tuple[object, ...], Options] = field(default_factory=dict)
    _limit_s: float = math.inf
    best: Layout | None = None
    _top: list[Layout] = field(default_factory=list)
    _best_of: dict[tuple[str, ...], Layout] = field(default_factory=dict)

    def run(self, spots: Sequence[Spot]) -> list[Layout]:
        """Return the layouts found, best first: the best `width`, and the best of each set of clusters.

        Node groups that train alone come first: they are few, and what they reach prunes the chains of many.
        """
        sets = list(island_sets(spots, self.space))
        singles = [one for one in sets if all(len(island) == 1 for island in one)]
        chains = [one for one in sets if any(len(island) > 1 for island in one)]
        for some in (singles, chains):
            for branch in sorted(self._branches(some), key=lambda one: one.promise_s):
                if self.tally.stopped:
                    break
                self._visit(branch)
        return self.found

    def limit_s(self) -> float:
        """Return the estimate of the last of the best `width` layouts: what a branch must promise to beat."""
        return self._limit_s

    def _branches(self, sets: Sequence[tuple[Island, ...]]) -> Iterator[Branch]:
        for islands, schedule, ring in self._parted(sets):
            for size in self.space.micro_batch_sizes(self.asked_size, self.samples):
                if self._left_out(islands, size, schedule):
                    continue
                options = self._options_of(islands, size, schedule)
                if not all(options):
                    continue
                promise_s = self._promise_s(options, self.samples // size) + ring
                if promise_s < math.inf:
                    yield Branch(islands, size, schedule, ring, promise_s)

    def _parted(self, sets: Sequence[tuple[Island, ...]]) -> Iterator[tuple[tuple[Island, ...], str, float]]:
        """Yield the sets of islands that may train together, each schedule, and the seconds of their ring."""
        space = self.space
        for islands in sets:
            ring = space.ring_s(islands)
            if ring == math.inf or (len(islands) > 1 and space.limits.dp):
                continue  # a fixed dp is that of one chain of stages
            if ring >= self.limit_s():
                self.tally.pruned += 1
                continue
            all_spots = list(itertools.chain(*islands))
            if not space.limits.mixed_chips and len({s.group.chip for s in all_spots}) > 1:
                continue
            for schedule in space.schedules(all_spots):
                yield islands, schedule, ring

    def _left_out(self, islands: Sequence[Island], size: int, schedule: str) -> bool:
        """Say whether a branch is none of those that the search is kept to."""
        names = frozenset(frozenset((s.cluster, s.group.name) for s in flat(island)) for island in islands)
        return self.near is not None and (names, size, schedule) not in self.near

    def _promise_s(self, options: Sequence[Options], total: int) -> float:
        if len(options) == 1:
            return min(_alone_s(one, total) for one in options[0])
        found = self._compose(options, total, lambda *_: False, 0.0)
        return found if isinstance(found, float) else found[0]

    @property
    def _compose(self) -> Callable[..., tuple[float, tuple[Option, ...]] | float]:
        return compose_even if self.space.limits.even_batches else compose

    def _options_of(self, islands: Sequence[Island], size: int, schedule: str) -> list[Options]:
        """Return the options of each island; islands of one spot share those of their kind.

        An island that trains alone has only those that can beat what was found by then.
        """
        total, found = self.samples // size, []
        alone = len(islands) == 1
        for island in islands:
            key: tuple[object, ...] = (size, schedule, alone, *(id(spot) for spot in island))
            if len(island) == 1 and not island[0].members:
                key = (size, schedule, alone, *self.space.alike(island[0]))
            if key not in self._options:
                limit_s = self.limit_s() if alone and len(island) > 1 else math.inf
                coarse = not alone and len(island) > 1 and sum(s.chips for s in island) > MANY_CHIPS

                def make(
                    island: Island = island, limit_s: float = limit_s, coarse: bool = coarse
                ) -> Iterator[Option]:
                    for shape in self.space.shapes(island, size, schedule, total, limit_s, coarse):
                        yield Option(shape, shape.bound)

                open_at_once = ALL if alone else OPEN
                self._options[key] = Options(make, self._scale_s(make, total), open_at_once)
                self.space.thinned = self.space.thinned or self._options[key].more
            found.append(self._options[key])
        return found

    def _scale_s(self, make: Callable[[], Iterable[Option]], total: int) -> float:
        """Return a time about which options are worth comparing: the best so far, or what they promise."""
        if self.best is not None:
            return self.best.estimate_s
        return min((one.cost.first_s + total / one.shape.dp * one.cost.pace_s for one in make()), default=0.0)

    def _visit(self, branch: Branch) -> None:
        if branch.promise_s >= self.limit_s():
            self.tally.pruned += 1
            return
        options = self._options_of(branch.islands, branch.micro_batch_size, branch.schedule)
        if len(options) == 1:
            self._visit_single(branch, options[0])
            return
        total = self.samples // branch.micro_batch_size
        answer = self._compose(options, total, self._cut, self.limit_s() - branch.ring_s)
        if isinstance(answer, float) or self.tally.stopped:
            self.tally.pruned += 1
            return
        chosen = []
        for option, island in zip(answer[1], branch.islands, strict=True):
            if option.chain is not None:
                chosen.append((self._placed(option.shape, island), option.chain))
        if branch.schedule == "overlapped" and len({shape.num_stages for shape, _ in chosen}) > 1:
            return  # a plan has one warm-up for all its replicas
        even = self.space.limits.even_batches
        self._keep(deal(chosen, total, branch.micro_batch_size, branch.ring_s, even))

    def _visit_single(self, branch: Branch, options: Options) -> None:
        """Cut the chains of one island in the order of their bounds, until none can beat what was found."""
        total = self.samples // branch.micro_batch_size

        ordered = sorted(options, key=lambda one: _alone_s(one, total))
        for place, option in enumerate(ordered):
            if _alone_s(option, total) >= self.limit_s():
                self.tally.pruned += len(ordered) - place
                return
            if not self._cut_below(option, -(-total // option.shape.dp)):
                continue
            if option.chain is not None:
                shape = self._placed(option.shape, branch.islands[0])
                self._keep(deal([(shape, option.chain)], total, branch.micro_batch_size, 0.0))
            if self.tally.stopped:
                return

    def _placed(self, shape: Shape, island: Island) -> Shape:
        """Return the shape at the spot of this island, where it was made for another of its kind."""
        if len(island) > 1 or shape.pooled or shape.segments[0].spot is island[0]:
            return shape
        segments = [one._replace(spot=island[0]) for one in shape.segments]
        return self.space.shape(segments, shape.dp, shape.schedule)

    def _cut_below(self, option: Option, micro_batches: int) -> bool:
        """Cut an option of an island that trains alone, unless a closer bound says that it cannot pay."""
        while not option.cut:
            if not self._cut(option, micro_batches):
                return False
            least_s = option.cost.first_s + (micro_batches - 1) * option.cost.pace_s
            if not option.cut and least_s >= self.limit_s():
                self.tally.pruned += 1
                return False
        return True

    def _cut(self, option: Option, micro_batches: int) -> bool:
        """Cut an option and count it; False where it is infeasible, or bound by a link that may not bind.

        For unlike layers, whose splits take long, a closer bound comes first, in another call.
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
        if not self.go_on(self.tally, self.best):
            self.tally.stopped = True
        if best is None:
            return False
        option.shape, option.chain = best
        option.cost, option.cut = best[1].cost, True
        return True

    def _keep(self, layout: Layout | None) -> None:
        """Keep a layout if it is among the best, or the best of its set of clusters."""
        most = self.space.limits.max_chips
        if layout is None or (most and layout.num_chips > most):
            return
        if layout.link_bound and not self.link_bound:
            return
        time_s, old = layout.estimate_s, self._best_of.get(layout.clusters)
        if time_s >= self._limit_s and old is not None and old.estimate_s <= time_s:
            return
        if old is None or time_s < old.estimate_s:
            self._best_of[layout.clusters] = layout
        if self.best is None or time_s < self.best.estimate_s:
            self.best = layout
        insort(self._top, layout, key=lambda one: (one.estimate_s, one.num_chips))
        del self._top[self.width :]
        if len(self._top) == self.width:
            self._limit_s = self._top[-1].estimate_s

    @property
    def found(self) -> list[Layout]:
        """What was found so far, best first."""
        others = [one for one in self._best_of.values() if all(one is not top for top in self._top)]
        return self._top + sorted(others, key=lambda one: (one.estimate_s, one.num_chips))


def _alone_s(option: Option, total: int) -> float:
    """Return the least seconds in which a shape's replicas end `total` micro-batches on their own."""
    bound, dp = option.shape.bound, option.shape.dp
    return bound.first_s + (-(-total // dp) - 1) * bound.pace_s
