"""`can_finish`: can a pipeline within a relaxation finish its micro-batches in time, in some order of the slots?

Checks the stages in turn (`layers_within_time`) with their memory limits, links and all-reduce. Errs on one side
only: it returns True for every pipeline that can finish.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.bound.layers_within_time import StageLimit, layers_within_time
from isthmus.plan.search.bound.reduce_tail import ReduceTail
from isthmus.plan.search.bound.relaxations import Relaxation, Relaxations
from isthmus.plan.search.costs.slots import ChipSlot
from isthmus.plan.search.costs.stage_cost_table import StageCostTable


@dataclass(frozen=True)
class FeasibilityQuery:
    """Can a replica finish `micro_batches` within `time_s`?"""

    micro_batches: int
    time_s: float
    # Replicas that run in step and send at once; all others have one micro-batch less.
    replicas_in_step: int
    # Forwards that a stage may run ahead, per stage after it; 0: unlimited.
    max_ahead: int


SlotStages = tuple[ChipSlot, StageCostTable, int]
"""A slot of a pipeline, its cost table, and the most stages there."""


def can_finish(
    relaxations: Relaxations,
    relaxation: Relaxation,
    slots: Sequence[ChipSlot],
    tail: ReduceTail,
    query: FeasibilityQuery,
) -> tuple[bool, int]:
    """Return whether some order of the slots may finish in time, and the number of stages checked.

    Where layers differ, each stage is charged its cheapest ones.
    """
    spent, returns = 0, relaxations.can_return(slots)
    blocks = [(slot, *one[0]) for slot, one in zip(slots, relaxation.choices, strict=True)]
    for order in itertools.permutations(blocks):
        names = [slot.cluster for slot, _, _ in order]
        first, last = order[0][0], order[-1][0]
        if len(list(itertools.groupby(names))) > len(set(names)) or not first.reads_data:
            continue
        if last.reads_data:
            found, seen = _fits_in_time(relaxations, order, relaxation, tail, query)
            spent += seen
            if found:
                return True, spent
        if returns:
            found, seen = _can_finish_returning(relaxations, order, relaxation, tail, query)
            spent += seen
            if found:
                return True, spent
    return False, spent


def _can_finish_returning(
    relaxations: Relaxations,
    order: Sequence[SlotStages],
    relaxation: Relaxation,
    tail: ReduceTail,
    query: FeasibilityQuery,
) -> tuple[bool, int]:
    """Return whether a pipeline that returns to its first slot may finish, and the stages checked.

    Bisects over the number of stages at the end: a range is checked as one, and split where it may finish.
    """
    slot, cost_table, count = order[0]
    todo, spent = [(1, count - 1)] if count > 1 else [], 0
    while todo:
        low, high = todo.pop()
        blocks = [(slot, cost_table, count - low), *order[1:], (slot, cost_table, high)]
        found, seen = _fits_in_time(relaxations, blocks, relaxation, tail, query)
        spent += seen
        if found and low == high:
            return True, spent
        if found:
            middle = (low + high) // 2
            todo += [(middle + 1, high), (low, middle)]
    return False, spent


def _fits_in_time(
    relaxations: Relaxations,
    blocks: Sequence[SlotStages],
    relaxation: Relaxation,
    tail: ReduceTail,
    query: FeasibilityQuery,
) -> tuple[bool, int]:
    stages = _stage_limits(relaxations, blocks, relaxation, tail, query)
    end_s = relaxations.reduce_end_s(blocks[0][1], relaxation.local_replicas, tail, is_first=True)
    time_s = query.time_s - tail.fixed_s - relaxations.optimizer_overhead_s
    return layers_within_time(stages, relaxations.num_layers, query.micro_batches, time_s, end_s), len(stages)


def _stage_limits(
    relaxations: Relaxations,
    blocks: Sequence[SlotStages],
    relaxation: Relaxation,
    tail: ReduceTail,
    query: FeasibilityQuery,
) -> list[StageLimit]:
    """Return the limits of each stage; where a slot has several stages, each of them may stay empty.

    Pooled slots are charged no transfers between clusters: their replicas are not all in step.
    """
    dp, pooled = relaxation.dp, any(slot.members for slot, _, _ in blocks)
    alone, found, micro_batches = len(blocks) == 1, list[StageLimit](), query.micro_batches
    steady = _jitter_free(relaxations, blocks)
    after, before = sum(stages for _, _, stages in blocks), None
    for slot, cost_table, count in blocks:
        hop_s = wire_s = 0.0
        if before is not None and before.cluster != slot.cluster and not pooled:
            hop_s, wire_s = _hop_times(relaxations, (before, slot), cost_table, dp, query, steady)
        before = slot
        least, most = cost_table.forward_share_range
        reduce_s, layer_s = (
            relaxations.reduce_s(cost_table, relaxation.local_replicas, tail),
            cost_table.shortest_layer_s,
        )
        tables = relaxations.middle_stage_seconds(cost_table, dp, min(count, micro_batches))
        for own in range(count, 0, -1):
            after -= 1
            ahead = query.max_ahead * after if query.max_ahead else micro_batches
            in_flight = own if own < micro_batches else micro_batches
            seconds, rest_s = tables[in_flight - 1], 0.0
            ends = (alone and own == count, after == 0)
            if any(ends):
                seconds = relaxations.stage_seconds(cost_table, ends, in_flight, dp)
                rest_s = (
                    relaxations.reduce_end_s(cost_table, relaxation.local_replicas, tail, is_first=False)
                    if ends[1]
                    else 0.0
                )
            found.append(StageLimit(seconds, layer_s, least, most, ahead, reduce_s, rest_s, hop_s, wire_s, int(alone)))
            hop_s = wire_s = 0.0
    return found


def _jitter_free(relaxations: Relaxations, blocks: Sequence[SlotStages]) -> bool:
    """Return whether no link of a pipeline has jitter; only then do equal replicas stay in step."""
    names = [slot.cluster for slot, _, _ in blocks]
    routes = [
        relaxations.space.routes.route(*ends)
        for a, b in itertools.pairwise(names)
        if a != b
        for ends in ((a, b), (b, a))
    ]
    return all(route.jitter_free for route in routes if route)


def _hop_times(
    relaxations: Relaxations,
    slots: tuple[ChipSlot, ChipSlot],
    cost_table: StageCostTable,
    dp: int,
    query: FeasibilityQuery,
    jitter_free: bool,
) -> tuple[float, float]:
    """Return, for one direction between two slots, the least seconds of a message and of all messages."""
    ends = (slots[0].cluster, slots[1].cluster)
    there, back = relaxations.space.routes.route(*ends), relaxations.space.routes.route(*ends[::-1])
    if there is None or back is None:
        return 0.0, math.inf
    num_bytes = cost_table.message_bytes
    messages = dp * (query.micro_batches - 1) + query.replicas_in_step
    crowd = query.replicas_in_step if jitter_free else 1
    hop_s = min(
        (route.delay_s if route.jitter_free else 0.0) + num_bytes * crowd / route.bytes_per_s for route in (there, back)
    )
    return hop_s, messages * num_bytes / min(there.bytes_per_s, back.bytes_per_s)
