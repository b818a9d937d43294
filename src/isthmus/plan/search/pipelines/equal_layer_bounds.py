"""`least_interval_s` and `least_end_s`: lower bounds for stages of equal layers, ignoring memory and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

StageKinds = Sequence[tuple[int, float]]
"""(number of stages, seconds of a layer there) for each slot."""

MAX_UNMERGED = 4
"""Of more slots, those on which a layer takes equally long count as one."""


def least_interval_s(num_layers: int, kinds: StageKinds) -> float:
    """Return the least time of the slowest stage if each stage holds one or more whole layers."""
    if len(kinds) > MAX_UNMERGED:
        kinds = [(count, layer_s) for count, layer_s, _ in _merged((*one, 0) for one in kinds)]
    slowest_s = max(layer_s for _, layer_s in kinds)
    interval_s = max(slowest_s, num_layers / sum(count / layer_s for count, layer_s in kinds))
    while True:
        room, next_s = 0, math.inf
        for count, layer_s in kinds:
            held = int(interval_s / layer_s + 1e-9)
            room += count * held
            if (held + 1) * layer_s < next_s:
                next_s = (held + 1) * layer_s
        if room >= num_layers:
            return interval_s
        interval_s = next_s


def least_end_s(
    num_layers: int, kinds: StageKinds, repeats: int, interval_s: float, *, may_be_empty: bool = False
) -> float:
    """Return the least (sum of stage times + `repeats` x pace) over paces of at least `interval_s`.

    The longer the pace, the more layers the fastest stages may take. `may_be_empty`: all stages of a slot but one may
    hold no layer, so that the bound also holds for fewer stages.
    """
    rows = [(count, layer_s, 1 if may_be_empty else count) for count, layer_s in kinds]
    if len(rows) > MAX_UNMERGED:
        rows = _merged(rows)
    each_s, spare = sum(placed * layer_s for _, layer_s, placed in rows), num_layers - sum(row[2] for row in rows)
    rows.sort(key=lambda row: row[1])
    free_s, best_s = each_s + spare * rows[0][1], math.inf
    while free_s + repeats * interval_s < best_s:
        left, sum_s, next_s = spare, each_s, math.inf
        for count, layer_s, placed in rows:
            held = int(interval_s / layer_s + 1e-9)
            more = count * held - placed
            if more > left:
                more = left
            left, sum_s = left - more, sum_s + more * layer_s
            if (held + 1) * layer_s < next_s:
                next_s = (held + 1) * layer_s
        if not left:
            best_s = min(best_s, sum_s + repeats * interval_s)
        interval_s = next_s
    return best_s


def _merged(rows: Iterable[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    """Return rows of (stages, seconds of a layer, layers placed) with those of equal seconds added up."""
    found: dict[float, tuple[int, int]] = {}
    for count, layer_s, placed in rows:
        counts, layers = found.get(layer_s, (0, 0))
        found[layer_s] = counts + count, layers + placed
    return [(count, layer_s, placed) for layer_s, (count, placed) in found.items()]
