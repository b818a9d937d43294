"""`may_end`: could a replica of a decided chance end so many micro-batches in time, its stages in some order?

It looks at the chance stage by stage (`layers_within`), with what each may hold in memory, its wires and its
all-reduce, and never says no to a chain that could.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.plan.search.chances import Chance, Chances
from isthmus.plan.search.seat import Seat
from isthmus.plan.search.spots import Spot
from isthmus.plan.search.tail import Tail
from isthmus.plan.search.within import StageLimit, layers_within


@dataclass(frozen=True)
class Look:
    """What is asked of a replica: to end `micro_batches` within `time_s`.

    `in_step` replicas do the same at the same time and send at once, the others have one micro-batch less.
    `ahead` is the forwards a stage may be ahead for each stage after it (0: any number).
    """

    micro_batches: int
    time_s: float
    in_step: int
    ahead: int


def may_end(
    chances: Chances, chance: Chance, spots: Sequence[Spot], tail: Tail, look: Look
) -> tuple[bool, int]:
    """Return whether some order of the spots may do it, and the number of stages that were looked at.

    Of layers that differ a stage takes those that suit it best.
    """
    spent = 0
    for order in itertools.permutations(range(len(spots))):
        names = [spots[place].cluster for place in order]
        if len(list(itertools.groupby(names))) > len(set(names)):
            continue
        if not (spots[order[0]].reads_data and spots[order[-1]].reads_data):
            continue
        blocks = [(spots[place], *chance.choices[place][0]) for place in order]
        stages = _stages(chances, blocks, chance.dp, tail, look)
        spent += len(stages)
        end_s = chances.end_s(blocks[0][1], chance.dp, tail, is_first=True)
        time_s = look.time_s - tail.fixed_s - chances.rest_s
        if layers_within(stages, chances.layers, look.micro_batches, time_s, end_s):
            return True, spent
    return False, spent


def _stages(
    chances: Chances, blocks: Sequence[tuple[Spot, Seat, int]], dp: int, tail: Tail, look: Look
) -> list[StageLimit]:
    """Return the stages of a chain; where several spots have some, any of them may stay empty."""
    alone, found, micro_batches = len(blocks) == 1, list[StageLimit](), look.micro_batches
    steady = _steady(chances, blocks)
    after, before = sum(stages for _, _, stages in blocks), None
    for spot, seat, count in blocks:
        hop_s = wire_s = 0.0
        if before is not None and before.cluster != spot.cluster:
            hop_s, wire_s = _hop(chances, (before, spot), seat, dp, look, steady)
        before = spot
        least, most = seat.forward_share
        reduce_s, layer_s = chances.reduce_s(seat, dp, tail), seat.shortest_layer_s
        tables = chances.tables(seat, dp, min(count, micro_batches))
        for own in range(count, 0, -1):
            after -= 1
            ahead = look.ahead * after if look.ahead else micro_batches
            in_flight = own if own < micro_batches else micro_batches
            seconds, rest_s = tables[in_flight - 1], 0.0
            ends = (alone and own == count, after == 0)
            if any(ends):
                seconds = chances.seconds(seat, ends, in_flight, dp)
                rest_s = chances.end_s(seat, dp, tail, is_first=False) if ends[1] else 0.0
            found.append(
                StageLimit(seconds, layer_s, least, most, ahead, reduce_s, rest_s, hop_s, wire_s, int(alone))
            )
            hop_s = wire_s = 0.0
    return found


def _steady(chances: Chances, blocks: Sequence[tuple[Spot, Seat, int]]) -> bool:
    """Say whether no wire of a chain has jitter: only then do equal replicas stay in step."""
    names = [spot.cluster for spot, _, _ in blocks]
    ways = [
        chances.space.ways.way(*ends)
        for a, b in itertools.pairwise(names)
        if a != b
        for ends in ((a, b), (b, a))
    ]
    return all(way.steady for way in ways if way)


def _hop(
    chances: Chances, spots: tuple[Spot, Spot], seat: Seat, dp: int, look: Look, steady: bool
) -> tuple[float, float]:
    """Return the least seconds of a message between two spots, and those of all, one way."""
    ends = (spots[0].cluster, spots[1].cluster)
    there, back = chances.space.ways.way(*ends), chances.space.ways.way(*ends[::-1])
    if there is None or back is None:
        return 0.0, math.inf
    num_bytes = seat.message_bytes
    messages = dp * (look.micro_batches - 1) + look.in_step
    crowd = look.in_step if steady else 1
    hop_s = min(
        (way.delay_s if way.steady else 0.0) + num_bytes * crowd / way.bytes_per_s for way in (there, back)
    )
    return hop_s, messages * num_bytes / min(there.bytes_per_s, back.bytes_per_s)
