"""`may_end`: can a pipeline within a relaxation finish its micro-batches in time, in some order of the slots?

Checks the stages in turn (`layers_within`) with their memory limits, links and all-reduce. Errs on one side
only: it returns True for every pipeline that can finish.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.bound.layers_within import StageLimit, layers_within
from isthmus.plan.search.bound.reduce_tail import Tail
from isthmus.plan.search.bound.relaxations import Chance, Chances
from isthmus.plan.search.costs.slots import Spot
from isthmus.plan.search.costs.stage_costs import Seat


@dataclass(frozen=True)
class Look:
    """Can a replica finish `micro_batches` within `time_s`?"""

    micro_batches: int
    time_s: float
    # Replicas that run in step and send at once; all others have one micro-batch less.
    in_step: int
    # Forwards that a stage may run ahead, per stage after it; 0: unlimited.
    ahead: int


Block = tuple[Spot, Seat, int]
"""A slot of a pipeline, its cost table, and the most stages there."""


def may_end(
    chances: Chances, chance: Chance, spots: Sequence[Spot], tail: Tail, look: Look
) -> tuple[bool, int]:
    """Return whether some order of the slots may finish in time, and the number of stages checked.

    Where layers differ, each stage is charged its cheapest ones.
    """
    spent, returns = 0, chances.returns(spots)
    blocks = [(slot, *one[0]) for slot, one in zip(spots, chance.choices, strict=True)]
    for order in itertools.permutations(blocks):
        names = [slot.cluster for slot, _, _ in order]
        first, last = order[0][0], order[-1][0]
        if len(list(itertools.groupby(names))) > len(set(names)) or not first.reads_data:
            continue
        if last.reads_data:
            found, seen = _in_time(chances, order, chance, tail, look)
            spent += seen
            if found:
                return True, spent
        if returns:
            found, seen = _may_return(chances, order, chance, tail, look)
            spent += seen
            if found:
                return True, spent
    return False, spent


def _may_return(
    chances: Chances, order: Sequence[Block], chance: Chance, tail: Tail, look: Look
) -> tuple[bool, int]:
    """Return whether a pipeline that returns to its first slot may finish, and the stages checked.

    Bisects over the number of stages at the end: a range is checked as one, and split where it may finish.
    """
    slot, cost_table, count = order[0]
    todo, spent = [(1, count - 1)] if count > 1 else [], 0
    while todo:
        low, high = todo.pop()
        blocks = [(slot, cost_table, count - low), *order[1:], (slot, cost_table, high)]
        found, seen = _in_time(chances, blocks, chance, tail, look)
        spent += seen
        if found and low == high:
            return True, spent
        if found:
            middle = (low + high) // 2
            todo += [(middle + 1, high), (low, middle)]
    return False, spent


def _in_time(
    chances: Chances, blocks: Sequence[Block], chance: Chance, tail: Tail, look: Look
) -> tuple[bool, int]:
    stages = _stages(chances, blocks, chance, tail, look)
    end_s = chances.end_s(blocks[0][1], chance.reducing, tail, is_first=True)
    time_s = look.time_s - tail.fixed_s - chances.rest_s
    return layers_within(stages, chances.layers, look.micro_batches, time_s, end_s), len(stages)


def _stages(
    chances: Chances, blocks: Sequence[Block], chance: Chance, tail: Tail, look: Look
) -> list[StageLimit]:
    """Return the limits of each stage; where a slot has several stages, each of them may stay empty.

    Pooled slots are charged no transfers between clusters: their replicas are not all in step.
    """
    dp, pooled = chance.dp, any(slot.members for slot, _, _ in blocks)
    alone, found, micro_batches = len(blocks) == 1, list[StageLimit](), look.micro_batches
    steady = _steady(chances, blocks)
    after, before = sum(stages for _, _, stages in blocks), None
    for slot, cost_table, count in blocks:
        hop_s = wire_s = 0.0
        if before is not None and before.cluster != slot.cluster and not pooled:
            hop_s, wire_s = _hop(chances, (before, slot), cost_table, dp, look, steady)
        before = slot
        least, most = cost_table.forward_share
        reduce_s, layer_s = chances.reduce_s(cost_table, chance.reducing, tail), cost_table.shortest_layer_s
        tables = chances.tables(cost_table, dp, min(count, micro_batches))
        for own in range(count, 0, -1):
            after -= 1
            ahead = look.ahead * after if look.ahead else micro_batches
            in_flight = own if own < micro_batches else micro_batches
            seconds, rest_s = tables[in_flight - 1], 0.0
            ends = (alone and own == count, after == 0)
            if any(ends):
                seconds = chances.seconds(cost_table, ends, in_flight, dp)
                rest_s = chances.end_s(cost_table, chance.reducing, tail, is_first=False) if ends[1] else 0.0
            found.append(
                StageLimit(seconds, layer_s, least, most, ahead, reduce_s, rest_s, hop_s, wire_s, int(alone))
            )
            hop_s = wire_s = 0.0
    return found


def _steady(chances: Chances, blocks: Sequence[Block]) -> bool:
    """Return whether no link of a pipeline has jitter; only then do equal replicas stay in step."""
    names = [slot.cluster for slot, _, _ in blocks]
    routes = [
        chances.space.ways.way(*ends)
        for a, b in itertools.pairwise(names)
        if a != b
        for ends in ((a, b), (b, a))
    ]
    return all(route.steady for route in routes if route)


def _hop(
    chances: Chances, spots: tuple[Spot, Spot], seat: Seat, dp: int, look: Look, steady: bool
) -> tuple[float, float]:
    """Return, for one direction between two slots, the least seconds of a message and of all messages."""
    ends = (spots[0].cluster, spots[1].cluster)
    there, back = chances.space.ways.way(*ends), chances.space.ways.way(*ends[::-1])
    if there is None or back is None:
        return 0.0, math.inf
    num_bytes = seat.message_bytes
    messages = dp * (look.micro_batches - 1) + look.in_step
    crowd = look.in_step if steady else 1
    hop_s = min(
        (route.delay_s if route.steady else 0.0) + num_bytes * crowd / route.bytes_per_s
        for route in (there, back)
    )
    return hop_s, messages * num_bytes / min(there.bytes_per_s, back.bytes_per_s)
