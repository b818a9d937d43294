"""The branch-and-bound search over slots, replica groups, micro-batch sizes, schedules and layer splits.

The tree: sets of slots > partitions into replica groups > micro-batch size > schedule > a pipeline per group
(order, degrees, numbers of stages and replicas) > layers > micro-batches per replica. Branches are visited in
the order of their lower bounds (`compose_groups` on bounds), each completely; a branch whose bound does not beat
the best layouts so far is pruned with everything below it. A branch waits in a heap under a bound that needs a sum
over its slots only, and its pipelines are ranked when it comes up: of many slots, most sets are never ranked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from isthmus.plan.search.bound.relaxations import Relaxations
from isthmus.plan.search.compose.best_layouts import BestLayouts
from isthmus.plan.search.compose.compose_equal import compose_equal
from isthmus.plan.search.compose.compose_groups import (
    PipelineOption,
    PipelineOptions,
    compose_groups,
    earliest_options_s,
)
from isthmus.plan.search.compose.group_options import group_options
from isthmus.plan.search.compose.plan_layout import PlanLayout, make_layout
from isthmus.plan.search.compose.runner_ups import runner_ups
from isthmus.plan.search.compose.search_branch import BranchKey, SearchBranch
from isthmus.plan.search.costs.slots import ChipSlot, flatten_pools
from isthmus.plan.search.pipelines.candidate_slots import MAX_CANDIDATES, candidate_slots
from isthmus.plan.search.pipelines.enumerate_pipelines import PipelineEnumerator
from isthmus.plan.search.pipelines.pipeline_ranking import BoundedPipeline, PipelineRanking
from isthmus.plan.search.pipelines.pipeline_shape import PipelineCost, PipelineShape, PipelineSplit
from isthmus.plan.search.pipelines.replica_groups import MAX_SLOTS_IN_PIPELINE, ReplicaGroup, replica_group_sets
from isthmus.plan.search.pipelines.search_space import MAX_CHIPS_UNEQUAL_DEGREES, SearchSpace
from isthmus.plan.search.pipelines.shape_bound import shape_bound

MAX_EXAMINED_WITHOUT_GAIN = 1500
"""In a thinned space the search stops after examining this many pipelines without a better layout."""

MAX_COMPOSITIONS = 8
"""Most compositions of a branch whose layouts are compared, where reductions that no bound counts make them longer."""

UNRANKED, PARTLY_RANKED, RANKED = range(3)
"""Progress of a branch: its loose bound, a bound of its groups of pipelines, or that of its first pipeline."""

RANKING_STEP = 1.02
"""Ratio of a branch's bound to which its pipelines are ranked at once beyond the next branch's."""


@dataclass
class SearchStats:
    """Statistics of a search: pipelines split, and pipelines or branches pruned by a bound."""

    evaluated: int = 0
    # Pipelines split, or pruned by a bound of their own.
    examined: int = 0
    pruned: int = 0
    # Whether `should_continue` ended the search.
    stopped: bool = False


@dataclass
class BranchAndBound:
    """One search.

    In a thinned space it stops after `MAX_EXAMINED_WITHOUT_GAIN` pipelines without a better layout; the limit is a
    count, so that results are deterministic.
    """

    space: SearchSpace
    samples: int
    requested_size: int
    best_layouts: BestLayouts = field(default_factory=BestLayouts)
    # Called with (stats, best layout) after each evaluated option; False stops the search.
    should_continue: Callable[[SearchStats, PlanLayout | None], bool] = lambda *_: True
    stats: SearchStats = field(default_factory=SearchStats)
    # Whether links may set the pace.
    allow_link_bound: bool = True
    # The only branches to search; None: all.
    warm_start: frozenset[BranchKey] | None = None
    _options: dict[tuple[object, ...], PipelineOptions] = field(default_factory=dict)
    _pipelines: dict[tuple[object, ...], PipelineEnumerator] = field(default_factory=dict)
    # The same by replica group, micro-batch size and whether they are coarse.
    _pipelines_by_slots: dict[tuple[ReplicaGroup, int, bool], PipelineEnumerator] = field(default_factory=dict)
    _single_options: dict[tuple[BoundedPipeline, str], PipelineOption] = field(default_factory=dict)
    # Ranking of the pipelines of an enumerator, by its id, opened as far as bounds of branches need it.
    _rankings: dict[int, PipelineRanking] = field(default_factory=dict)
    # Estimate of the best layout when the present sets were begun: options are opened by it.
    _phase_best_s: float = math.inf
    # Value of `stats.examined` when the best layout last improved.
    _improved_at: int = 0

    def run(self, slots: Sequence[ChipSlot]) -> list[PlanLayout]:
        """Search, and return the best `width` layouts and the best of each set of clusters, best first.

        Sets of single-slot groups come first: they are few, and their layouts prune the longer pipelines.
        """
        sets = [one for one in self._replica_group_sets(slots) if self._has_needed(itertools.chain(*one))]
        singles = [one for one in sets if all(len(replica_group) == 1 for replica_group in one)]
        chains = [one for one in sets if any(len(replica_group) > 1 for replica_group in one)]
        for some in (singles, chains):
            self._improved_at = self.stats.examined
            self._phase_best_s = self.best_layouts.best.estimate_s if self.best_layouts.best else math.inf
            self._visit_in_order(some)
            if self.stats.stopped:
                break
        return self.best_layouts.layouts

    def _replica_group_sets(self, slots: Sequence[ChipSlot]) -> list[tuple[ReplicaGroup, ...]]:
        """Return the sets of replica groups to search: of many slots, combinations of the candidates among them."""
        relaxations = next(iter(self._relaxations.values()), None)
        if relaxations is None or len(slots) <= MAX_CANDIDATES:
            return list(replica_group_sets(slots, self.space))
        routes, num_bytes = self.space.routes, self._messages_bytes
        found = candidate_slots(slots, routes, lambda one: relaxations.no_wait_s([one]), num_bytes)
        kept = (
            *found.combined,
            *(slot for slot in slots if self.space.needed_cluster == slot.cluster and slot not in found.combined),
        )
        self.space.thinned = True
        combined = set(kept)
        sets = list(replica_group_sets(kept, self.space, found.in_pipelines)) if kept else []
        sets += [((slot,),) for slot in slots if slot not in combined]
        return sets + [tuple((slot,) for slot in some) for some in found.wide]

    def _has_needed(self, slots: Iterable[ChipSlot]) -> bool:
        """Return whether a plan over these slots may use the cluster that every plan needs."""
        needed = self.space.needed_cluster
        return needed is None or any(one.cluster == needed for one in flatten_pools(slots))

    def _visit_in_order(self, sets: Sequence[tuple[ReplicaGroup, ...]]) -> None:
        """Visit the branches of sets of replica groups in the order of their lower bounds.

        A branch is ranked when its loose bound comes up, and little further than to the next branch's bound; at equal
        bounds unranked branches come first, so that the order is that of the tight bounds, then of the sets.
        """
        heap = [(one.lower_bound_s, UNRANKED, number, one) for number, one in enumerate(self._branches(sets))]
        heapify(heap)
        while heap and not self._should_stop():
            bound_s, progress, number, branch = heappop(heap)
            if bound_s >= self.best_layouts.cutoff_s:
                self.stats.pruned += 1 + len(heap)
                return
            cutoff_s = self._cutoff_s(branch)
            if bound_s >= cutoff_s:
                self.stats.pruned += 1
                continue
            if progress == RANKED:
                self._visit(replace(branch, lower_bound_s=bound_s))
                continue
            up_to_s = max(bound_s, heap[0][0] if heap else math.inf) * RANKING_STEP
            tight_s, whole = self._tight_bound_s(branch, up_to_s)
            if tight_s < cutoff_s:
                bound_s = max(bound_s, tight_s)
                heappush(heap, (bound_s, RANKED if whole else PARTLY_RANKED, number, branch))
            elif tight_s < math.inf:
                self.stats.pruned += 1
            if progress == UNRANKED and not self.should_continue(self.stats, self.best_layouts.best):
                self.stats.stopped = True

    def _cutoff_s(self, branch: SearchBranch) -> float:
        """Return the estimate that a layout of this branch must beat to be of use."""
        return self.best_layouts.cutoff_for(branch.clusters)

    def for_space(
        self, space: SearchSpace, best_layouts: BestLayouts, warm_start: frozenset[BranchKey] | None
    ) -> BranchAndBound:
        """Return the same search for another space."""
        return replace(
            self,
            space=space,
            best_layouts=best_layouts,
            warm_start=warm_start,
            _options={},
            _pipelines={},
            _pipelines_by_slots={},
            _single_options={},
            _rankings={},
        )

    def clear_caches(self) -> None:
        """Clear the caches of pipelines, which are large; the layouts found stay."""
        for pipelines in self._pipelines.values():
            pipelines.clear_cache()
        for known in (
            self._options,
            self._pipelines,
            self._pipelines_by_slots,
            self._single_options,
            self._rankings,
        ):
            known.clear()

    def _should_stop(self) -> bool:
        """Return whether the search was stopped or has gone too long without a better layout."""
        exhausted = not self.space.exhaustive and self.stats.examined - self._improved_at > MAX_EXAMINED_WITHOUT_GAIN
        return self.stats.stopped or exhausted

    def _branches(self, sets: Sequence[tuple[ReplicaGroup, ...]]) -> Iterator[SearchBranch]:
        """Yield the branches with loose bounds: all chips at their best rate, all messages over the links."""
        sizes = self.space.micro_batch_sizes(self.requested_size, self.samples)
        for replica_groups, schedule, ring_s in self._candidate_groups(sets):
            for size in sizes:
                if not self._is_excluded(replica_groups, size, schedule):
                    bound_s = max(ring_s + self._no_wait_s(replica_groups, size), self._wire_s(replica_groups))
                    yield SearchBranch(replica_groups, size, schedule, ring_s, bound_s)

    def _tight_bound_s(self, branch: SearchBranch, up_to_s: float) -> tuple[float, bool]:
        """Return the lower bound of a branch's pipelines, and whether it is that of the first one; infinite if empty.

        Pipelines are ranked up to `up_to_s`.
        """
        if len(branch.replica_groups) == 1:
            chains = self._pipelines_of(branch.replica_groups[0], branch.micro_batch_size)
            if id(chains) not in self._rankings:  # the cutoff only falls: what it excludes now stays excluded
                self._rankings[id(chains)] = chains.ranked_by_end(self.best_layouts.cutoff_s)
            bound_s, first = self._rankings[id(chains)].open_until(up_to_s)
            return bound_s, first is not None
        return self._lower_bound_s(branch), True

    def _no_wait_s(self, replica_groups: Sequence[ReplicaGroup], size: int) -> float:
        """Return the seconds of a batch without any waiting, on all chips of some replica groups."""
        return self._relaxations[size].no_wait_s(list(itertools.chain(*replica_groups))) * (1 - 1e-9)

    def _wire_s(self, replica_groups: Sequence[ReplicaGroup]) -> float:
        """Return the least seconds of a step's messages, if one pipeline passes all slots."""
        slots = replica_groups[0]
        if len(replica_groups) > 1 or not 1 < len(slots) <= MAX_SLOTS_IN_PIPELINE or any(one.members for one in slots):
            return 0.0
        names = dict.fromkeys(slot.cluster for slot in slots)
        rates = sorted(self.space.routes.bytes_per_s(a, b) for a, b in itertools.combinations(names, 2))
        slowest = rates[max(0, len(rates) - len(names) + 1)] if rates else math.inf  # a path may omit slower links
        return self._messages_bytes / slowest * (1 - 1e-9) if slowest else math.inf

    @cached_property
    def _messages_bytes(self) -> float:
        """Bytes that a pipeline sends over each of its links in a step."""
        task = self.space.workload
        precision_bytes = 4 if task.stored_precision == "fp32" else 2
        return task.profile.boundary_bytes(self.samples * task.sequence_length, precision_bytes)

    @cached_property
    def _relaxations(self) -> dict[int, Relaxations]:
        sizes = self.space.micro_batch_sizes(self.requested_size, self.samples)
        return {size: Relaxations(self.space, (), size, self.samples // size) for size in sizes}

    def _candidate_groups(
        self, sets: Sequence[tuple[ReplicaGroup, ...]]
    ) -> Iterator[tuple[tuple[ReplicaGroup, ...], str, float]]:
        """Yield feasible sets of replica groups with each schedule and the seconds of their ring."""
        space = self.space
        for replica_groups in sets:
            ring = space.ring_s(replica_groups)
            if ring == math.inf or (len(replica_groups) > 1 and (space.limits.dp or space.limits.framework)):
                continue  # a fixed dp, or a framework, applies to one pipeline
            if self._excludes(ring):
                self.stats.pruned += 1
                continue
            all_spots = list(itertools.chain(*replica_groups))
            if not space.limits.mixed_chips and len({s.group.chip for s in all_spots}) > 1:
                continue
            for schedule in space.schedules(all_spots):
                yield replica_groups, schedule, ring

    def _excludes(self, time_s: float) -> bool:
        """Return whether no plan that takes at least `time_s` can be among the best."""
        return time_s >= self.best_layouts.cutoff_s

    def _is_excluded(self, replica_groups: Sequence[ReplicaGroup], size: int, schedule: str) -> bool:
        """Return whether a warm start excludes a branch."""
        if self.warm_start is None:
            return False
        names = frozenset(
            frozenset((s.cluster, s.group.name) for s in flatten_pools(replica_group))
            for replica_group in replica_groups
        )
        return (names, size, schedule) not in self.warm_start

    def _lower_bound_s(self, branch: SearchBranch) -> float:
        """Return a lower bound on a branch of several replica groups; infinite if it is empty."""
        options = self._options_of(branch.replica_groups, branch.micro_batch_size, branch.schedule)
        total, ring_s = self.samples // branch.micro_batch_size, branch.ring_s
        if not all(options):
            return math.inf
        if not self.space.limits.even_replicas:
            return ring_s + earliest_options_s(options, total, 0.0, self._cutoff_s(branch) - ring_s)
        found = compose_equal(options, total, lambda *_: False, 0.0)
        return ring_s + (found if isinstance(found, float) else found[0])

    @property
    def _compose(self) -> Callable[..., tuple[float, tuple[PipelineOption, ...]] | float]:
        return compose_equal if self.space.limits.even_replicas else compose_groups

    def _pipelines_of(self, replica_group: ReplicaGroup, size: int, coarse: bool = False) -> PipelineEnumerator:
        """Return the pipelines of a replica group; equal groups share them."""
        found = self._pipelines_by_slots.get((replica_group, size, coarse))
        if found is None:
            by_kind = sort_by_kind(replica_group)
            key = (size, coarse, *self.space.group_key(by_kind))
            if key not in self._pipelines:
                self._pipelines[key] = self.space.enumerate_pipelines(by_kind, size, self.samples // size, coarse)
            found = self._pipelines_by_slots[replica_group, size, coarse] = self._pipelines[key]
        return found

    def _options_of(self, replica_groups: Sequence[ReplicaGroup], size: int, schedule: str) -> list[PipelineOptions]:
        """Return the options of each of several replica groups."""
        found = []
        for replica_group in replica_groups:
            coarse = len(replica_group) > 1 and sum(slot.chips for slot in replica_group) > MAX_CHIPS_UNEQUAL_DEGREES
            chains = self._pipelines_of(replica_group, size, coarse)
            key = (id(chains), schedule)
            if key not in self._options:
                self._options[key] = group_options(chains, schedule, self._phase_best_s)
                self.space.thinned = self.space.thinned or self._options[key].has_more
            found.append(self._options[key])
        return found

    def _visit(self, branch: SearchBranch) -> None:
        if len(branch.replica_groups) == 1:
            self._visit_single(branch)
            return
        options = self._options_of(branch.replica_groups, branch.micro_batch_size, branch.schedule)
        total = self.samples // branch.micro_batch_size
        even = self.space.limits.even_replicas

        def compose(some: Sequence[PipelineOptions]) -> tuple[float, tuple[PipelineOption, ...]] | float:
            return self._compose(some, total, self._evaluate, self._cutoff_s(branch) - branch.ring_s)

        def layout_of(chosen: Sequence[tuple[PipelineShape, PipelineSplit]]) -> PlanLayout | None:
            return make_layout(chosen, total, branch.micro_batch_size, branch.ring_s, even)

        self._keep_compositions(branch, runner_ups(options, compose, PipelineOptions.narrowed), layout_of)

    def _keep_compositions(
        self,
        branch: SearchBranch,
        compositions: Iterable[tuple[float, Sequence[PipelineOption]]],
        layout_of: Callable[[Sequence[tuple[PipelineShape, PipelineSplit]]], PlanLayout | None],
    ) -> None:
        """Keep the layouts of a branch's compositions, until no later one can be better.

        A composition bounds its layout, which a reduction between node groups may make longer: then the next ones, up
        to `MAX_COMPOSITIONS`, are compared with it.
        """
        best_s, place = math.inf, -1
        for place, (time_s, answer) in enumerate(itertools.islice(compositions, MAX_COMPOSITIONS)):  # noqa: B007
            if self.stats.stopped or time_s + branch.ring_s >= min(best_s, self._cutoff_s(branch)):
                break
            chosen = [
                (self._shape_for_group(option, replica_group), option.split)
                for option, replica_group in zip(answer, branch.replica_groups, strict=True)
                if option.split is not None
            ]
            if branch.schedule == "overlapped" and len({shape.num_stages for shape, _ in chosen}) > 1:
                continue  # all replicas of a plan share one warm-up
            layout = layout_of(chosen)
            self._keep_layout(layout)
            if layout is not None:
                best_s = min(best_s, layout.estimate_s)
                if layout.ring_s <= branch.ring_s:
                    break
        self.stats.pruned += place < 0

    def _visit_single(self, branch: SearchBranch) -> None:
        """Split the pipelines of one replica group in the order of their bounds, until none can improve."""
        chains = self._pipelines_of(branch.replica_groups[0], branch.micro_batch_size)
        total, ranking = chains.micro_batches, chains.ranked_by_end(self._cutoff_s(branch))
        for least_s, one in ranking:
            cutoff_s = self._cutoff_s(branch)
            if least_s >= cutoff_s:
                self.stats.pruned += ranking.num_left + 1
                return
            option = self._single_options.get((one, branch.schedule))
            if option is None:
                option = PipelineOption(
                    one.make(branch.schedule), PipelineCost(one.first_s, one.interval_s), chains.replica_group
                )
                self._single_options[one, branch.schedule] = option
            if self._evaluate_below_cutoff(option, -(-total // one.dp), cutoff_s) and option.split is not None:
                shape = self._shape_for_group(option, branch.replica_groups[0])
                even = self.space.limits.even_replicas
                self._keep_layout(make_layout([(shape, option.split)], total, branch.micro_batch_size, 0.0, even))
            if self._should_stop():
                return
        self.stats.pruned += ranking.num_left

    def _shape_for_group(self, option: PipelineOption, replica_group: ReplicaGroup) -> PipelineShape:
        """Return the shape at the slots of this replica group if it was made for an equal one."""
        there, here = option.replica_group, sort_by_kind(replica_group)
        if all(a is b for a, b in zip(there, here, strict=True)):
            return option.shape
        moved = dict(zip(map(id, there), here, strict=True))
        segments = [one._replace(slot=moved[id(one.slot)]) for one in option.shape.segments]
        return self.space.make_shape(segments, option.shape.dp, option.shape.schedule)

    def _evaluate_below_cutoff(self, option: PipelineOption, micro_batches: int, cutoff_s: float) -> bool:
        """Evaluate an option of a group that trains alone, unless a tighter bound prunes it."""
        while not option.exact:
            if not self._evaluate(option, micro_batches):
                option.exact = True  # no better evaluation exists
                return False
            least_s = option.cost.first_s + (micro_batches - 1) * option.cost.interval_s
            if not option.exact and least_s >= cutoff_s:
                self.stats.pruned += 1
                return False
        return True

    def _evaluate(self, option: PipelineOption, micro_batches: int) -> bool:
        """Evaluate an option and count it; False if it is infeasible or violates `allow_link_bound`.

        A first call only tightens the bound, which prunes most splits.
        """
        if not option.bound_tightened:
            option.bound_tightened = True
            if self.space.workload.equal_layers:
                costs = [shape_bound(one, option.cost) for one in option.shape.variants]
                self.stats.examined += len(costs)
            else:
                costs = [cost for one in option.shape.variants if (cost := one.split_bound(micro_batches))]
            if costs:
                option.cost = PipelineCost(min(one.first_s for one in costs), min(one.interval_s for one in costs))
            return bool(costs)
        best_s, best = math.inf, None
        for shape in option.shape.variants:
            self.stats.evaluated += 1
            self.stats.examined += not self.space.workload.equal_layers
            chain = shape.best_split(micro_batches)
            if chain is None or (chain.link_bound and not self.allow_link_bound):
                continue
            time_s = chain.cost.first_s + (micro_batches - 1) * chain.cost.interval_s
            if time_s < best_s:
                best_s, best = time_s, (shape, chain)
        if not self.should_continue(self.stats, self.best_layouts.best):
            self.stats.stopped = True
        if best is None:
            return False
        option.shape, option.split = best
        option.cost, option.exact = best[1].cost, True
        return True

    def _keep_layout(self, layout: PlanLayout | None) -> None:
        """Keep a layout, unless it exceeds the allowed chips or violates `allow_link_bound`."""
        most = self.space.limits.max_chips
        if layout is None or (most and layout.num_chips > most):
            return
        if self.allow_link_bound or not layout.link_bound:
            before = self.best_layouts.best
            self.best_layouts.keep(layout)
            if self.best_layouts.best is not before:
                self._improved_at = self.stats.examined


def sort_by_kind(replica_group: ReplicaGroup) -> ReplicaGroup:
    """Return the slots of a replica group by kind, so that equal groups match."""
    return tuple(sorted(replica_group, key=lambda slot: repr(slot.kind)))
