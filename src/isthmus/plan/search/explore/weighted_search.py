"""`WeightedSearch`: branch and bound on a weighted sum of time, cost and energy, after a search by time.

Its tree is that of `BranchAndBound` with one micro-batch size for all groups. A branch is bounded by the least time of
its chips, and by the price and power of the chips that it cannot do without and of the passes on those that do them for
least. The layouts of the search by time prune from the start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from isthmus.plan.search.compose.best_layouts import BestLayouts
from isthmus.plan.search.compose.joined_node_groups import joined_ring_s
from isthmus.plan.search.compose.plan_layout import PlacedPipeline, PlanLayout, expand_pools, make_layout
from isthmus.plan.search.compose.search_branch import SearchBranch
from isthmus.plan.search.costs.plan_value import ChipDraw, PlanValue
from isthmus.plan.search.explore.branch_and_bound import BranchAndBound, SearchStats, sort_by_kind
from isthmus.plan.search.pipelines.pipeline_ranking import BoundedPipeline
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape, PipelineSplit
from isthmus.plan.search.pipelines.replica_groups import ReplicaGroup
from isthmus.plan.search.pipelines.value_ranking import ValueBound, rank_by_value
from isthmus.plan.search.splits.distribute_by_value import distribute_by_value
from isthmus.plan.search.splits.distribute_micro_batches import ReplicaTiming

MAX_SPLITS = 64
"""Where energy counts, up to this many splits of a pipeline are all tried; of more, the fastest one."""

OPTIONS_BY_GROUPS = {2: 48, 3: 12, 4: 6}
"""Pipelines of each replica group that are combined with those of the others, by number of groups; of more groups 4."""

Shaped = tuple[PipelineShape, PipelineSplit]


@dataclass(frozen=True)
class _Option:
    """A pipeline of one of several replica groups, with lower bounds."""

    bound: ValueBound
    pipeline: BoundedPipeline
    replica_group: ReplicaGroup


@dataclass
class WeightedSearch(BranchAndBound):
    """A search by `value`; `most_s` and `most_cost` limit a step."""

    value: PlanValue = field(default_factory=lambda: PlanValue(per_s=1.0))
    most_s: float = math.inf
    most_cost: float = math.inf
    # Whether some pipelines or splits were left out.
    left_out: bool = False

    @classmethod
    def continue_from(
        cls, search: BranchAndBound, value: PlanValue, most_s: float = math.inf, most_cost: float = math.inf
    ) -> WeightedSearch:
        """Return the search by `value` that starts with the layouts of `search`."""
        same = {one.name: getattr(search, one.name) for one in fields(BranchAndBound)}
        found = cls(
            **same | {"stats": SearchStats(), "_improved_at": 0}, value=value, most_s=most_s, most_cost=most_cost
        )
        found.best_layouts = BestLayouts(search.best_layouts.num_kept, value_of=found.value_of)
        for layout in search.best_layouts.layouts:
            found._keep_layout(layout)
        return found

    def value_of(self, layout: PlanLayout) -> float:
        """Return the closed-form value of a layout."""
        time_s = layout.estimate_s
        return self.value.of(time_s, layout.price_per_s * time_s, layout.energy_j if self.value.per_j else 0.0)

    def _excludes(self, time_s: float) -> bool:
        return time_s > self.most_s or self.value.per_s * time_s >= self.best_layouts.cutoff_s

    def _keep_layout(self, layout: PlanLayout | None) -> None:
        if layout is None or layout.estimate_s > self.most_s or not all(one.stages for one in layout.pipelines):
            return
        if layout.price_per_s * layout.estimate_s <= self.most_cost:
            super()._keep_layout(layout)

    def _branches(self, sets: Sequence[tuple[ReplicaGroup, ...]]) -> Iterator[SearchBranch]:
        """Yield the branches that may meet the limits, `lower_bound_s` a bound on their value."""
        for branch in super()._branches(sets):
            bound, time_s = self._branch_bound(branch), branch.lower_bound_s
            total = self.samples // branch.micro_batch_size
            cost = max(bound.price_per_s * time_s, bound.pass_cost * total)
            if time_s <= self.most_s and cost <= self.most_cost:
                yield replace(branch, lower_bound_s=bound.value(self.value, time_s, total))

    def _branch_bound(self, branch: SearchBranch) -> ValueBound:
        """Return the bound for a branch: one chip of every slot, and the passes on the chips that do them for least."""
        relaxations = self._relaxations[branch.micro_batch_size]
        price_per_s = waiting_w = 0.0
        pass_cost = pass_j = math.inf
        for slot in itertools.chain(*branch.replica_groups):
            draw = ChipDraw.of(slot)
            price_per_s += draw.price_per_s
            waiting_w += draw.waiting_w
            chip_s = relaxations.least_chip_s(slot)
            pass_cost = min(pass_cost, chip_s * draw.price_per_s)
            pass_j = min(pass_j, chip_s * draw.more_w)
        return ValueBound(price_per_s, waiting_w, pass_cost, pass_j)

    def _tight_bound_s(self, branch: SearchBranch, _up_to_s: float) -> tuple[float, bool]:
        return branch.lower_bound_s, True

    def _visit(self, branch: SearchBranch) -> None:
        if branch.lower_bound_s >= self.best_layouts.cutoff_s:
            self.stats.pruned += 1
        elif len(branch.replica_groups) == 1:
            self._visit_single(branch)
        else:
            self._visit_several(branch)

    def _visit_single(self, branch: SearchBranch) -> None:
        group, total = sort_by_kind(branch.replica_groups[0]), self.samples // branch.micro_batch_size
        pipelines = self._pipelines_of(branch.replica_groups[0], branch.micro_batch_size)
        for least, _, one in rank_by_value(pipelines, [ChipDraw.of(slot) for slot in group], self.value, total):
            if least >= self.best_layouts.cutoff_s or self._should_stop():
                self.stats.pruned += 1
                return
            for chosen in self._splits(one, pipelines.replica_group, group, branch.schedule, -(-total // one.dp)):
                self._keep_layout(
                    make_layout([chosen], total, branch.micro_batch_size, 0.0, self.space.limits.even_replicas)
                )

    def _visit_several(self, branch: SearchBranch) -> None:
        """Compose the pipelines of several groups, the combinations with the least bounds first."""
        total, size = self.samples // branch.micro_batch_size, branch.micro_batch_size
        options = [self._options_by_value(one, branch) for one in branch.replica_groups]
        found = []
        for number, combined in enumerate(itertools.product(*options)):
            time_s = branch.ring_s + _least_end_s([one.pipeline for one in combined], total)
            if time_s < math.inf:
                found.append((self._combined_bound(combined, time_s, total), number, combined))
        for least, _, combined in sorted(found, key=lambda one: one[:2]):
            if least >= self.best_layouts.cutoff_s or self._should_stop():
                self.stats.pruned += 1
                return
            end_s = _least_end_s([one.pipeline for one in combined], total)
            splits = []
            for one in combined:
                pipelines = self._pipelines_of(one.replica_group, size)
                first_s, interval_s = one.pipeline.first_s, one.pipeline.interval_s
                share = min(total, 1 + math.floor(max(0.0, end_s - first_s) / interval_s))
                here = sort_by_kind(one.replica_group)
                splits.append(list(self._splits(one.pipeline, pipelines.replica_group, here, branch.schedule, share)))
            for chosen in itertools.product(*splits):
                if branch.schedule == "overlapped" and len({shape.num_stages for shape, _ in chosen}) > 1:
                    continue  # all replicas of a plan share one warm-up
                self._keep_layout(self._layout(chosen, total, size, branch.ring_s))

    def _options_by_value(self, replica_group: ReplicaGroup, branch: SearchBranch) -> list[_Option]:
        """Return the pipelines of one of several groups that train a batch for least alone."""
        total = self.samples // branch.micro_batch_size
        pipelines = self._pipelines_of(replica_group, branch.micro_batch_size)
        draws = [ChipDraw.of(slot) for slot in sort_by_kind(replica_group)]
        ranked = rank_by_value(pipelines, draws, self.value, total)
        most = OPTIONS_BY_GROUPS.get(len(branch.replica_groups), 4)
        found = [_Option(bound, one, replica_group) for _, bound, one in itertools.islice(ranked, most + 1)]
        self.left_out = self.left_out or len(found) > most
        return found[:most]

    def _combined_bound(self, combined: Sequence[_Option], time_s: float, total: int) -> float:
        bounds = [one.bound for one in combined]
        together = ValueBound(
            sum(one.price_per_s for one in bounds),
            sum(one.waiting_w for one in bounds),
            min(one.pass_cost for one in bounds),
            min(one.pass_j for one in bounds),
        )
        return together.value(self.value, time_s, total)

    def _splits(
        self, one: BoundedPipeline, there: ReplicaGroup, here: ReplicaGroup, schedule: str, micro_batches: int
    ) -> Iterator[Shaped]:
        """Yield the variants of a pipeline at the slots `here`, split; in all ways of few, where energy counts."""
        moved = dict(zip(map(id, there), here, strict=True))
        for variant in one.make(schedule).variants:
            self.stats.evaluated += 1
            self.stats.examined += 1
            segments = [part._replace(slot=moved[id(part.slot)]) for part in variant.segments]
            shape = self.space.make_shape(segments, variant.dp, schedule)
            chains = [shape.best_split(micro_batches)]
            layers, stages = self.space.workload.profile.num_layers, shape.num_stages
            if self.value.per_j and not shape.pooled and math.comb(layers - 1, stages - 1) <= MAX_SPLITS:
                for cuts in itertools.combinations(range(1, layers), stages - 1):
                    chains.append(shape.with_layers(tuple(itertools.pairwise((0, *cuts, layers))), micro_batches))
            elif self.value.per_j and stages > 1:
                self.left_out = True
            if not self.should_continue(self.stats, self.best_layouts.best):
                self.stats.stopped = True
            for chain in chains:
                if chain is not None and (self.allow_link_bound or not chain.link_bound):
                    yield shape, chain

    def _layout(self, chosen: Sequence[Shaped], total: int, size: int, ring_s: float) -> PlanLayout | None:
        """Return the layout of split pipelines, micro-batches distributed by value."""
        if self.space.limits.even_replicas or not self.value.per_j:
            return make_layout(chosen, total, size, ring_s, self.space.limits.even_replicas)
        if not all(PlacedPipeline(shape, chain, (total,)).stages for shape, chain in chosen):
            return None
        chosen = expand_pools(chosen)
        timings = [ReplicaTiming(chain.cost.first_s, chain.cost.interval_s, shape.dp) for shape, chain in chosen]
        draws = [[ChipDraw.of(slot) for slot in shape.slots] for shape, _ in chosen]
        per_s, more_j = self.value.per_s, []
        for (shape, chain), each in zip(chosen, draws, strict=True):
            stages = PlacedPipeline(shape, chain, (total,)).stages
            rows = list(zip(each, shape.cost_tables, stages, strict=True))
            chips = [(draw, shape.dp * table.num_chips) for draw, table, _ in rows]
            per_s += sum(
                count * (self.value.per_cost * draw.price_per_s + self.value.per_j * draw.waiting_w)
                for draw, count in chips
            )
            more_j.append(sum(table.num_chips * draw.more_w * stage.total_s for draw, table, stage in rows))
        counts = distribute_by_value(timings, [self.value.per_j * one for one in more_j], total, per_s)
        if counts is None:
            return None
        placed = (PlacedPipeline(shape, chain, row) for (shape, chain), row in zip(chosen, counts, strict=True))
        return PlanLayout(tuple(placed), size, chosen[0][0].schedule, joined_ring_s(chosen, ring_s))


def _least_end_s(pipelines: Sequence[BoundedPipeline], total: int) -> float:
    """Return a lower bound on the end of `total` micro-batches over pipelines whose replicas take one or more."""
    replicas = sum(one.dp for one in pipelines)
    if replicas > total:
        return math.inf
    rate = sum(one.dp / one.interval_s for one in pipelines)
    begun = sum(one.dp * one.first_s / one.interval_s for one in pipelines)
    return max((total - replicas + begun) / rate, *(one.first_s for one in pipelines)) * (1 - 1e-9)
