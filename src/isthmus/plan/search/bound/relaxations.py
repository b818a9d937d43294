"""`Relaxations`: optimistic relaxations of replica groups, used to prove `bound_s`; no plan exceeds them.

A relaxation is a number of replicas with the most stages that fit at each slot, for fixed degrees or for all
of them. Pipelines with fewer stages at a slot are covered: stages may stay empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isthmus.plan.search.bound.micro_batch_bound import ROUNDING_MARGIN, StageBlock, max_micro_batches
from isthmus.plan.search.bound.reduce_tail import ReduceTail
from isthmus.plan.search.bound.wan_bound import WanBound, wan_bound
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_cost_table import StageCostTable, round_up_replicas
from isthmus.plan.search.costs.workload import REDUCED_RATIO
from isthmus.plan.search.pipelines.search_space import SearchSpace
from isthmus.plan.search.pipelines.slot_orders import may_return
from isthmus.plan.time.collectives import all_reduce_s

FORWARDS_AHEAD = {"1f1b": 1, "overlapped": 2}
"""Forwards that a stage may run ahead per stage after it, by schedule; for others unlimited."""

UNBOUNDED = 0
"""Unlimited forwards ahead."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """`dp` replicas; for each slot its choices of (cost table, most stages that fit)."""

    dp: int
    choices: tuple[tuple[tuple[StageCostTable, int], ...], ...]
    # Lower bound on replicas with every stage in one cluster; 1 for a pooled slot.
    local_replicas: int

    @property
    def degrees_fixed(self) -> bool:
        """Whether every slot has one choice."""
        return all(len(one) == 1 for one in self.choices)

    def fix_degrees(self) -> Iterator[Relaxation]:
        """Yield the relaxation with every combination of choices."""
        for chosen in itertools.product(*self.choices):
            yield Relaxation(self.dp, tuple((one,) for one in chosen), self.local_replicas)


class Relaxations:
    """The relaxations for one micro-batch size and `num_micro_batches` micro-batches on any of `slots`."""

    def __init__(
        self, space: SearchSpace, slots: Sequence[ChipSlot], micro_batch_size: int, num_micro_batches: int
    ) -> None:
        self.space, self.micro_batch_size, self.num_micro_batches = space, micro_batch_size, num_micro_batches
        self.num_layers = space.workload.profile.num_layers
        self.gradient_bytes = 4 * REDUCED_RATIO[space.limits.zero]
        self.least_parameters = min(layer.parameters for layer in space.workload.layer_kinds)
        self._middle_seconds: dict[tuple[int, int], list[tuple[float, ...]]] = {}
        self._by_slots: dict[tuple[int, ...], list[Relaxation]] = {}
        self._least_seconds: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._reduce_s_per_parameter: dict[tuple[int, int], float] = {}
        self._wan_bounds: dict[tuple[str, ...], WanBound] = {}
        self._stage_blocks: dict[tuple[int, int, int, float], StageBlock] = {}
        self._capacities = {slot: self._compute_capacities(slot) for slot in slots}
        cost_tables = [cost_table for room in self._capacities.values() for cost_table, _ in room]
        self.optimizer_overhead_s = min((cost_table.optimizer_overhead_s for cost_table in cost_tables), default=0.0)
        self._reference = cost_tables[0] if cost_tables else None
        self._message_bytes = cost_tables[0].message_bytes if cost_tables else 0.0
        self._rates: dict[ChipSlot, float] = {}

    def no_wait_s(self, slots: Sequence[ChipSlot]) -> float:
        """Return the seconds of all chips at their best rate, without any waiting."""
        rate = sum(map(self._rate, slots))
        return self.optimizer_overhead_s + self.num_micro_batches * self.num_layers / rate if rate else math.inf

    def _rate(self, slot: ChipSlot) -> float:
        """Return the layers per second of a slot's chips at their best degrees."""
        found = self._rates.get(slot)
        if found is None:
            each = (room / self.layer_s(cost_table) for cost_table, room in self._capacities_of(slot))
            found = self._rates[slot] = max(each, default=0.0)
        return found

    def least_chip_s(self, slot: ChipSlot) -> float:
        """Return the least chip-seconds of a micro-batch through all layers at a slot; infinite if none fit."""
        each = (self.layer_s(table) * table.num_chips for table, _ in self._capacities_of(slot))
        return self.num_layers * min(each, default=math.inf) * (1 - 1e-9)

    # --- enumeration ---

    def for_group(self, slots: tuple[ChipSlot, ...]) -> list[Relaxation]:
        """Return the relaxations of a replica group."""
        key = tuple(map(id, slots))
        if key not in self._by_slots:
            self._by_slots[key] = list(self._single_slot(slots[0]) if len(slots) == 1 else self._multi_slot(slots))
        return self._by_slots[key]

    def max_ahead(self, multi_cluster: bool) -> int:
        """Return the forwards a stage may run ahead per stage after it; `multi_cluster`: over several clusters."""
        limits = self.space.limits
        if limits.schedule:
            usual = limits.schedule
        else:
            usual = "overlapped" if multi_cluster and limits.overlap and not limits.executable else "1f1b"
        if limits.executable and usual == "overlapped":
            return UNBOUNDED  # it fills the available memory
        return FORWARDS_AHEAD.get(usual, UNBOUNDED)

    def can_return(self, slots: Sequence[ChipSlot]) -> bool:
        """Return whether a pipeline over these slots may end at the slot where it began."""
        return may_return(slots) and not self.space.limits.executable

    def _single_slot(self, slot: ChipSlot) -> Iterator[Relaxation]:
        """Yield every relaxation of one slot."""
        if not slot.reads_data:
            return
        for cost_table, room in self._capacities_of(slot):
            for stages in range(1, min(room, self.num_layers) + 1):
                for dp in self.space.stage_counts.replica_counts(room // stages, self.num_micro_batches):
                    yield Relaxation(dp, (((cost_table, stages),),), 1 if slot.members else dp)

    def _multi_slot(self, slots: tuple[ChipSlot, ...]) -> Iterator[Relaxation]:
        """Yield the relaxations of several slots by number of replicas, with degrees left open."""
        if sum(slot.reads_data for slot in slots) < (1 if self.can_return(slots) else 2):
            return
        capacities, numbers = [self._capacities_of(slot) for slot in slots], set[int]()
        for _, room in itertools.chain(*capacities):
            for stages in range(1, min(room, self.num_layers) + 1):
                numbers.update(self.space.stage_counts.replica_counts(room // stages, self.num_micro_batches))
        for dp in sorted(numbers):
            choices = tuple(
                tuple((cost_table, min(room // dp, self.num_layers)) for cost_table, room in one if room >= dp)
                for one in capacities
            )
            if all(choices):
                yield Relaxation(dp, choices, 1 if any(slot.members for slot in slots) else dp)

    def _capacities_of(self, slot: ChipSlot) -> list[tuple[StageCostTable, int]]:
        if slot not in self._capacities:
            self._capacities[slot] = self._compute_capacities(slot)
        return self._capacities[slot]

    def _compute_capacities(self, slot: ChipSlot) -> list[tuple[StageCostTable, int]]:
        """Return each cost table of a slot with the number of stages that fit."""
        most, found = self.space.limits.max_chips, []
        for cut in self.space.degree_choices(slot):
            cost_table = self.space.cost_table(slot, cut, self.micro_batch_size)
            room = slot.stage_capacity(cost_table.num_chips)
            found.append((cost_table, min(room, most // cost_table.num_chips) if most else room))
        return [one for one in found if one[1]]

    # --- bounds ---

    def no_wait_micro_batches(self, relaxation: Relaxation, tail: ReduceTail, time_s: float) -> int:
        """Return the most micro-batches of a replica whose stages never wait."""
        rate = 0.0
        for choices in relaxation.choices:
            rate += max(stages / self.layer_s(cost_table) for cost_table, stages in choices)
        most = (time_s - tail.fixed_s - self.optimizer_overhead_s) * rate / self.num_layers * (1 + 1e-9)
        return min(math.floor(most), -(-self.num_micro_batches // relaxation.dp)) if most >= 1 else 0

    def pipelined_micro_batches(
        self,
        relaxation: Relaxation,
        slots: tuple[ChipSlot, ...],
        tail: ReduceTail,
        time_s: float,
        limit: int,
        multi_cluster: bool,
    ) -> int:
        """Return the most micro-batches of a replica, counting pipeline fill and drain and its messages."""
        left_s, crossing = time_s - tail.fixed_s - self.optimizer_overhead_s, self._wan_bound(slots)
        if crossing.wire_s:  # one micro-batch's passes precede the first message and follow the last
            passes_s = self.num_layers * min(
                self.layer_s(cost_table) for one in relaxation.choices for cost_table, _ in one
            )
            messages = (left_s - passes_s) / crossing.wire_s * ROUNDING_MARGIN
            limit = min(limit, 1 + math.floor((messages - 1) / relaxation.dp)) if messages >= 1 else 0
        replicas = relaxation.local_replicas
        parts = [
            [self._stage_block(cost_table, stages, replicas, tail) for cost_table, stages in one]
            for one in relaxation.choices
        ]
        return max_micro_batches(
            parts, self.num_layers, left_s, limit,
            max_ahead=self.max_ahead(multi_cluster), whole_layers=self.space.workload.equal_layers,
            hops_s=crossing.hops_s,
        )  # fmt: skip

    def _stage_block(self, cost_table: StageCostTable, stages: int, replicas: int, tail: ReduceTail) -> StageBlock:
        """Return up to `stages` stages with a cost table; equal blocks are one object."""
        key = id(cost_table), stages, replicas, tail.s_per_parameter
        found = self._stage_blocks.get(key)
        if found is None:
            reduce_s = self.reduce_s(cost_table, replicas, tail) if self.space.workload.equal_layers else 0.0
            found = StageBlock(stages, self.layer_s(cost_table), reduce_s, cost_table.forward_share_range[1])
            self._stage_blocks[key] = found
        return found

    def _wan_bound(self, slots: tuple[ChipSlot, ...]) -> WanBound:
        """Return a lower bound on a pipeline's transfers between clusters; zero for pooled slots."""
        if any(slot.members for slot in slots):
            return WanBound()
        names = tuple(dict.fromkeys(slot.cluster for slot in slots))
        if names not in self._wan_bounds:
            self._wan_bounds[names] = wan_bound(names, self.space.routes, self._message_bytes)
        return self._wan_bounds[names]

    def layer_s(self, cost_table: StageCostTable) -> float:
        """Return the least seconds of a layer, both passes, weighted as on a reference chip."""
        if self._reference is None:
            self._reference = cost_table
        return cost_table.layer_s(self._reference)

    def reduce_s(self, cost_table: StageCostTable, dp: int, tail: ReduceTail) -> float:
        """Return the least seconds to reduce a layer's gradients over `dp` or more replicas."""
        return (
            self._reduce_parameter_s(cost_table, dp) * cost_table.least_parameters
            + tail.s_per_parameter * self.least_parameters
        )

    def stage_seconds(
        self, cost_table: StageCostTable, ends: tuple[bool, bool], in_flight: int, dp: int
    ) -> tuple[float, ...]:
        """Return a stage's seconds by number of layers, shape [most layers]; `ends`: (is first, is last).

        A later stage counts as first where all before it are empty, so with unequal layers it may hold the
        first layer. `dp` is rounded up to limit the number of tables: more replicas leave more memory.
        """
        dp = round_up_replicas(dp)
        zero = self.space.limits.zero if dp > 1 else 0
        if self.space.workload.equal_layers:
            return cost_table.layer_times(*ends, in_flight, dp, zero).seconds
        key = (id(cost_table), ends, in_flight, dp)
        if key not in self._least_seconds:
            places = {ends, (True, ends[1])}
            each = [cost_table.range_times(*place, in_flight, dp, zero).least_times.seconds for place in places]
            self._least_seconds[key] = tuple(map(min, itertools.zip_longest(*each, fillvalue=math.inf)))
        return self._least_seconds[key]

    def middle_stage_seconds(self, cost_table: StageCostTable, dp: int, count: int) -> list[tuple[float, ...]]:
        """Return a middle stage's seconds by number of layers, for 1 to `count` micro-batches in flight."""
        found = self._middle_seconds.setdefault((id(cost_table), dp), [])
        while len(found) < count:
            found.append(self.stage_seconds(cost_table, (False, False), len(found) + 1, dp))
        return found

    def reduce_end_s(self, cost_table: StageCostTable, dp: int, tail: ReduceTail, *, is_first: bool) -> float:
        """Return the least seconds to reduce what the first or last stage holds beside its layers."""
        parameters = cost_table.end_parameters(is_first)
        return self._reduce_parameter_s(cost_table, dp) * parameters + tail.s_per_parameter * parameters

    def _reduce_parameter_s(self, cost_table: StageCostTable, dp: int) -> float:
        """Return the seconds to reduce one parameter's gradient over `dp` or more replicas."""
        key = (id(cost_table), dp)
        if dp < 2:
            return 0.0
        if key not in self._reduce_s_per_parameter:
            each = self.gradient_bytes * (dp - 1) / dp
            self._reduce_s_per_parameter[key] = (
                each * all_reduce_s(cost_table.chip_model.topology, 1e12, dp, cost_table.num_chips) / 1e12
            )
        return self._reduce_s_per_parameter[key]


def no_wait_s(sizes: Sequence[Relaxations], slots: Sequence[ChipSlot], samples: int) -> float:
    """Return the seconds of all chips at their best rate over `sizes`, without any waiting."""
    rest_s = min(one.optimizer_overhead_s for one in sizes)
    rate = sum(max(samples / (one.no_wait_s([slot]) - one.optimizer_overhead_s) for one in sizes) for slot in slots)
    return rest_s + samples / rate if rate else math.inf
