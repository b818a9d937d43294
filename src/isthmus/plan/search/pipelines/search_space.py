"""`SearchSpace`: the search space: every pipeline over a replica group, with its degrees, sizes and schedules.

Small dimensions are enumerated completely, large ones thinned; `exhaustive` tells whether any was thinned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.search.costs.gradient_ring import gradient_ring_s
from isthmus.plan.search.costs.local_steps import local_ring_s
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import ChipSlot, flatten_pools
from isthmus.plan.search.costs.stage_cost_table import StageCostTable
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.search.pipelines.enumerate_pipelines import PipelineEnumerator, SlotOrder
from isthmus.plan.search.pipelines.pipeline_shape import PipelineShape
from isthmus.plan.search.pipelines.slot_orders import MAX_PERMUTED_SLOTS, returning_orders, slot_orders
from isthmus.plan.search.pipelines.stage_counts import StageCounts
from isthmus.plan.search.pipelines.stage_layout import PipelineSegment
from isthmus.schedule import SEARCHED

MAX_CHIPS_UNEQUAL_DEGREES = 256
"""Groups of three or more slots with more chips than this use the same degrees everywhere."""

MAX_DEGREE_COMBINATIONS = 64
"""Up to this many combinations of degrees over a group's slots are all tried."""

MAX_CP = 4
"""Largest context-parallel degree tried, unless a job fixes one."""

MIN_CP_SEQUENCE = 16384
"""Shortest sequence (tokens) for which context parallelism is tried."""


@dataclass
class SearchSpace:
    """Cost tables and pipelines of one job on one pool."""

    workload: TrainingWorkload
    routes: Routes
    limits: SearchLimits
    # Whether cost matters: fewer replicas than fit are tried, too.
    minimise_cost: bool = False
    # A cluster that takes part in every plan.
    needed_cluster: str | None = None
    # Whether some dimension was thinned.
    thinned: bool = False
    _cost_tables: dict[tuple[object, ...], StageCostTable] = field(default_factory=dict)
    _degree_choices: dict[tuple[int, int, int], tuple[StageDegrees, ...]] = field(default_factory=dict)

    @cached_property
    def stage_counts(self) -> StageCounts:
        """The candidate numbers of stages and replicas."""
        return StageCounts(self.limits, self.workload.profile.num_layers, self.minimise_cost)

    @property
    def exhaustive(self) -> bool:
        """Whether every dimension was enumerated completely so far.

        For a framework it never is: its recomputation is fitted after the split; nor for searched schedules, which
        are made for the best layouts of others.
        """
        searched = self.limits.schedule == SEARCHED
        return not (self.thinned or self.stage_counts.thinned or self.limits.framework or searched)

    def micro_batch_sizes(self, requested_size: int, global_batch_size: int) -> tuple[int, ...]:
        """Return the sizes to try: the requested one, and powers of two that divide the batch."""
        fixed = self.limits.micro_batch_size or (requested_size if self.limits.executable else None)
        if fixed:
            return (fixed,) if global_batch_size % fixed == 0 else ()
        sizes, size = {requested_size}, 1
        while size <= min(self.limits.max_micro_batch_size, global_batch_size):
            if global_batch_size % size == 0:
                sizes.add(size)
            size *= 2
        return tuple(sorted(sizes))

    def schedules(self, slots: Sequence[ChipSlot]) -> tuple[str, ...]:
        """Return the schedules to try; overlapping communication pays only across clusters.

        A searched schedule is made for finished layouts, which are those of the usual schedules.
        """
        if self.limits.schedule and self.limits.schedule != SEARCHED:
            kept = self.limits.overlap or self.limits.schedule != "overlapped"
            return (self.limits.schedule,) if kept else ()
        if self.limits.framework:
            return ("1f1b",)
        several = len({slot.cluster for slot in flatten_pools(slots)}) > 1
        if several and self.limits.overlap:
            return ("1f1b", "overlapped")
        return ("1f1b",)

    def degree_choices(self, slot: ChipSlot) -> tuple[StageDegrees, ...]:
        """Return the tensor, context and expert parallel degrees to try at a slot, within a node."""
        key = slot.group.num_linked_chips, slot.group.chips_per_node, slot.chips
        if key not in self._degree_choices:
            self._degree_choices[key] = self._make_degree_choices(slot)
        return self._degree_choices[key]

    def _make_degree_choices(self, slot: ChipSlot) -> tuple[StageDegrees, ...]:
        limits, profile = self.limits, self.workload.profile
        node = min(slot.group.num_linked_chips, slot.chips)
        layer = profile.layers[0]
        if limits.executable:
            node = min(slot.group.chips_per_node, slot.chips)
            return self._runtime_degrees(node, layer.attention.core.num_kv_heads if layer.attention.core else 1)
        heads = layer.attention.core.num_heads if layer.attention.core else 1
        powers = [1 << i for i in range(node.bit_length()) if 1 << i <= node]
        tps = [limits.tp] if limits.tp else [n for n in powers if heads % n == 0]
        long = self.workload.sequence_length >= MIN_CP_SEQUENCE
        cps = [limits.cp] if limits.cp else [n for n in powers if n <= MAX_CP] if long else [1]
        found = []
        for tp, cp in itertools.product(tps, cps):
            if tp * cp > node:
                continue
            for ep in self._expert_degrees(tp * cp):
                found.append(StageDegrees(tp=tp, cp=cp, ep=ep, sp=tp > 1))
        rules, tokens = limits.framework, self.workload.sequence_length
        if rules is not None:
            kv_heads = layer.attention.core.num_kv_heads if layer.attention.core else heads
            return tuple(one for one in found if rules.admits_degrees(one, tokens, kv_heads))
        return tuple(found)

    def _runtime_degrees(self, node_chips: int, heads: int) -> tuple[StageDegrees, ...]:
        """Return the degrees that the Isthmus runtime supports on `node_chips` chips.

        Each chip takes whole key and value heads.
        """
        powers, tokens = [1 << i for i in range(node_chips.bit_length())], self.workload.sequence_length
        tps = [self.limits.tp] if self.limits.tp else powers
        longest = MAX_CP if tokens >= MIN_CP_SEQUENCE else 1
        cps = [self.limits.cp] if self.limits.cp else [cp for cp in powers if cp <= longest]
        fitting = [(tp, cp) for tp in tps for cp in cps if tp * cp <= node_chips and not (heads % tp or tokens % cp)]
        return tuple(
            StageDegrees(tp=tp, cp=cp, ep=ep, sp=tp > 1 and tokens // cp % tp == 0)
            for tp, cp in fitting
            for ep in self._expert_degrees(tp * cp)
        )

    def _expert_degrees(self, chips: int) -> list[int]:
        """Return the expert-parallel degrees to try for a stage of `chips` chips; a fixed one may span replicas."""
        experts = max((one.feed_forward.num_experts for one in self.workload.profile.layers), default=0)
        if self.limits.ep:
            return [self.limits.ep] if self.limits.ep <= chips or experts else []
        if not experts:
            return [1]
        return sorted({1, math.gcd(experts, chips)})

    def cost_table(self, slot: ChipSlot, degrees: StageDegrees, micro_batch_size: int) -> StageCostTable:
        """Return the cost table for degrees at a slot; slots of one kind share it."""
        key = (*slot.kind, degrees, micro_batch_size)
        if key not in self._cost_tables:
            self._cost_tables[key] = StageCostTable(self.workload, slot, degrees, micro_batch_size)
        return self._cost_tables[key]

    def group_key(self, replica_group: Sequence[ChipSlot]) -> tuple[object, ...]:
        """Return a key that is equal for replica groups with the same pipelines, slots in this order."""
        if any(slot.members for slot in replica_group):
            return tuple(map(id, replica_group))
        names = [slot.cluster for slot in replica_group]
        slots = ((slot.kind, slot.chips, slot.reads_data, names.index(slot.cluster)) for slot in replica_group)
        return (
            *slots,
            *map(self.routes.route_kind, itertools.permutations(dict.fromkeys(names), 2)),
        )

    def make_shape(self, segments: Sequence[PipelineSegment], dp: int, schedule: str) -> PipelineShape:
        """Return a pipeline shape.

        A space with its own costs overrides `cost_table`, `group_key`, `make_shape` and `ring_s`.
        """
        return PipelineShape(self.workload, segments, dp, schedule, self.limits.zero, self.routes)

    def ring_s(self, replica_groups: Sequence[Sequence[ChipSlot]]) -> float:
        """Return the seconds of the rings over several replica groups.

        Infinite where they are not linked or, with local steps, form one group.
        """
        if len(replica_groups) == 1 and self.workload.local_steps == 1:
            return 0.0
        replica_groups = [flatten_pools(replica_group) for replica_group in replica_groups]

        def reduce_s(some: Sequence[Sequence[ChipSlot]]) -> float:
            return gradient_ring_s(self.workload, self.routes, some, self.limits.zero)

        def average_s(some: Sequence[Sequence[ChipSlot]]) -> float:
            return gradient_ring_s(self.workload, self.routes, some, 0)

        if self.workload.local_steps == 1:
            return reduce_s(replica_groups)
        return local_ring_s(replica_groups, self.workload.local_steps, reduce_s, average_s)

    def enumerate_pipelines(
        self,
        replica_group: Sequence[ChipSlot],
        micro_batch_size: int,
        micro_batches: int,
        coarse: bool = False,
    ) -> PipelineEnumerator:
        """Return the pipelines that use all slots of a replica group.

        Pipelines that return to their first slot are `variants` of one shape. `coarse` thins numbers of
        replicas and stages further, and skips returns.
        """
        orders, cuts = list[SlotOrder](), list[tuple[StageCostTable, ...]]()
        mixed = len({slot.group.chip for slot in replica_group}) > 1
        if (self.limits.mixed_chips or not mixed) and all(self.degree_choices(slot) for slot in replica_group):
            self.thinned = self.thinned or len(replica_group) > MAX_PERMUTED_SLOTS
            tables: dict[tuple[object, ...], StageCostTable] = {}
            for chosen in self._degree_combinations(replica_group):
                row = []
                for slot, cut in zip(replica_group, chosen, strict=True):
                    key = slot.kind, id(cut)
                    if key not in tables:
                        tables[key] = self.cost_table(slot, cut, micro_batch_size)
                    row.append(tables[key])
                cuts.append(tuple(row))
            orders = [
                self._make_order(replica_group, *one, cuts[0][0].message_bytes)
                for one in self._slot_orders(replica_group, coarse)
            ]
        return PipelineEnumerator(
            tuple(replica_group), orders, cuts, micro_batches, self.stage_counts, coarse, self.make_shape
        )

    def _make_order(
        self,
        replica_group: Sequence[ChipSlot],
        slots: tuple[ChipSlot, ...],
        visits_once: bool,
        can_return: bool,
        num_bytes: float,
    ) -> SlotOrder:
        places = {(slot.cluster, slot.group.name): place for place, slot in enumerate(replica_group)}
        along = self.routes.path_costs(tuple(slot.cluster for slot in slots))
        return SlotOrder(
            slots,
            tuple(places[slot.cluster, slot.group.name] for slot in slots),
            visits_once,
            can_return,
            along.delay_s,
            num_bytes * along.s_per_byte,
            num_bytes * along.slowest_s_per_byte,
        )

    def pipeline_shapes(
        self, replica_group: Sequence[ChipSlot], micro_batch_size: int, schedule: str, micro_batches: int
    ) -> Iterator[PipelineShape]:
        """Yield every pipeline shape that uses all slots of a replica group."""
        for one in self.enumerate_pipelines(replica_group, micro_batch_size, micro_batches).all_pipelines():
            yield one.make(schedule)

    def _slot_orders(
        self, replica_group: Sequence[ChipSlot], coarse: bool
    ) -> list[tuple[tuple[ChipSlot, ...], bool, bool]]:
        """Return the orders to try as (slots, may visit each once, may return to the first).

        With three or more slots, or unequal layers, returns are tried only where no order visits each slot
        once.
        """
        once = slot_orders(replica_group, self.routes)
        back = [] if self.limits.executable else returning_orders(replica_group, self.routes)
        if back and (coarse or (once and (len(replica_group) > 2 or not self.workload.equal_layers))):
            self.thinned, back = True, []
        return [(one, one in once, one in back) for one in dict.fromkeys(once + back)]

    def _degree_combinations(self, replica_group: Sequence[ChipSlot]) -> Iterator[tuple[StageDegrees, ...]]:
        """Yield degrees per slot; in larger groups per kind of slot, in the largest the same everywhere."""
        each = [self.degree_choices(slot) for slot in replica_group]
        if self.limits.framework:
            yield from ((base,) * len(each) for base in each[0] if all(base in options for options in each))
            return
        few = len(replica_group) <= 2 or sum(slot.chips for slot in replica_group) <= MAX_CHIPS_UNEQUAL_DEGREES
        if few and math.prod(len(one) for one in each) <= MAX_DEGREE_COMBINATIONS:
            yield from itertools.product(*each)
            return
        self.thinned = True
        of_kind = {slot.kind: cuts for slot, cuts in zip(replica_group, each, strict=True)}
        if few and math.prod(len(one) for one in of_kind.values()) <= MAX_DEGREE_COMBINATIONS:
            for chosen in itertools.product(*of_kind.values()):
                cut = dict(zip(of_kind, chosen, strict=True))
                yield tuple(cut[slot.kind] for slot in replica_group)
            return
        for base in dict.fromkeys(itertools.chain(*each)):
            yield tuple(base if base in options else options[-1] for options in each)
