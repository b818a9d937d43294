"""`max_micro_batches`: a closed-form upper bound on the micro-batches a replica finishes within a time.

Every split of a pipeline obeys three rules, for `L` layers, `M` micro-batches and a time `T`; stage `j` is
followed by `k` others, takes `l` per layer, and `g = T / (L l) - 1`:

- whole layers: a stage takes at most T / (M l + reduction) of them, rounded down; all stages hold `L`;
- filling: stage `j` computes M times, and while its first micro-batch goes to the end and back it computes at
  most `ahead x k` forwards, each a share `f` of a pass. So T is at least (all passes of one micro-batch) + (M
  - 1 - c k) x (its own pass), with c = ahead x f. Weighted by a = g / (M - 1 - c k), each layer would weigh
  more than T / L if the weights summed to less than 1, a contradiction. T is first reduced by the time that a
  micro-batch spends between clusters;
- the first stage reduces its gradients after everything else.

The bound takes the best order: fast stages first, where weights are large.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

ROUNDING_MARGIN = 1 + 1e-9
"""Rounding margin: a refutation must exceed it."""


class StageBlock(NamedTuple):
    """Up to `stages` stages of a pipeline at one slot."""

    stages: int
    # Least seconds of a layer, both passes.
    layer_s: float
    # Least seconds to reduce a layer's gradients at the end.
    reduce_s: float = 0.0
    # Largest share of a pass that is forward.
    max_forward_share: float = 1.0


def max_micro_batches(
    slots: Sequence[Sequence[StageBlock]],
    num_layers: int,
    time_s: float,
    limit: int,
    *,
    max_ahead: int | None,
    whole_layers: bool = True,
    hops_s: float = 0.0,
) -> int:
    """Return an upper bound, at most `limit`, on the micro-batches that a replica finishes within `time_s`.

    `slots` lists the choices for each slot, of which a pipeline takes one. `max_ahead` bounds the forwards as in
    the module docstring; 0: unlimited, None: micro-batches need not pass the stages in turn. `whole_layers`: all
    layers are equal, so stages hold whole numbers of them. A micro-batch spends `hops_s` between clusters,
    both ways.
    """
    filling_s = time_s - hops_s if max_ahead else time_s  # any number of forwards may fill the way there and back
    if filling_s <= 0:
        return 0
    free = time_s / num_layers * sum(max(one.stages / one.layer_s for one in parts) for parts in slots)
    free -= min(one.reduce_s / one.layer_s for parts in slots for one in parts)
    most = min(limit, math.floor(free * ROUNDING_MARGIN))
    if most < 2:
        return max(0, most)
    blocks = _weighted_choices(slots, num_layers, filling_s)
    share = 1.0 if not max_ahead else max_ahead * max(one.max_forward_share for parts in slots for one in parts)
    last = min(
        min(max(0.0, filling_s / (num_layers * one.layer_s) - 1), one.reduce_s / one.layer_s)
        for parts in slots
        for one in parts
    )

    def too_many(micro_batches: int) -> bool:
        if whole_layers and _whole_layers(slots, time_s, micro_batches, num_layers) < num_layers:
            return True
        if max_ahead is None:
            return False
        weight = _total_weight(blocks, micro_batches - 1, share) - last / (micro_batches - 1)
        return weight * ROUNDING_MARGIN < 1

    if not too_many(most):
        return most
    return bisect_left(range(2, most), True, key=too_many) + 1


def _whole_layers(slots: Sequence[Sequence[StageBlock]], time_s: float, micro_batches: int, num_layers: int) -> int:
    """Return the most layers that all stages together can hold."""
    limit_s, layers = time_s * ROUNDING_MARGIN, 0
    for parts in slots:
        layers += max(
            one.stages * min(num_layers, int(limit_s / (micro_batches * one.layer_s + one.reduce_s))) for one in parts
        )
    return layers


def _weighted_choices(
    slots: Sequence[Sequence[StageBlock]], num_layers: int, time_s: float
) -> list[list[tuple[float, int, int]]]:
    """Return each slot's choices as (g, stages, stages at other slots that may follow)."""
    slowest = [min(_time_gain(one, num_layers, time_s) for one in parts) for parts in slots]
    stages = [max(one.stages for one in parts) for parts in slots]
    found = []
    for place, parts in enumerate(slots):
        choices = []
        for one in parts:
            gain = _time_gain(one, num_layers, time_s)
            after = sum(
                n for i, (least, n) in enumerate(zip(slowest, stages, strict=True)) if i != place and least <= gain
            )
            if gain > 0:
                choices.append((gain, one.stages, after))
        found.append(choices)
    return found


def _time_gain(block: StageBlock, num_layers: int, time_s: float) -> float:
    return time_s / (num_layers * block.layer_s) - 1


def _total_weight(blocks: Sequence[Sequence[tuple[float, int, int]]], max_fill: int, forwards_share: float) -> float:
    """Return an upper bound on the sum of all weights.

    1 / (base - share k) is convex in k, so its mean is at most that of its ends.
    """
    total = 0.0
    for choices in blocks:
        best = 0.0
        for gain, stages, after in choices:
            near, far = max_fill - forwards_share * after, max_fill - forwards_share * (after + stages - 1)
            if far <= 0:
                return math.inf
            best = max(best, gain * stages * (1 / near + 1 / far) / 2)
        total += best
    return total
