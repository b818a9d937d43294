"""`layers_within_time`: can a chain of stages hold all layers and finish its micro-batches within a time?

It returns True for every chain that can. Each stage has a lower and an upper bound on its number of layers;
each bound tightens the others until they settle. What a stage may take follows from what must happen before
its first pass and after its last, whatever the split:

- the first micro-batch passes all earlier stages, and the last one returns through them;
- the stage runs all its own passes and reduces its gradients; the first stage reduces last;
- while its first micro-batch goes to the end and back, a stage runs at most `max_ahead` forwards, and while its
  last one does, at most `max_ahead` backwards: it idles for the rest of that time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

MAX_ROUNDS = 6
"""Upper limit on tightening rounds."""

ROUNDING_MARGIN = 1 + 1e-9
"""Rounding margin: a refutation must exceed it."""


class StageLimit(NamedTuple):
    """What is known of one stage."""

    # `seconds[n - 1]`: a micro-batch's passes with `n` layers, non-decreasing, as far as they fit in memory.
    seconds: Sequence[float]
    # Least seconds of any layer, both passes.
    layer_s: float
    # Bounds on the share of a pass that is forward.
    min_forward_share: float = 0.0
    max_forward_share: float = 1.0
    # Other micro-batches that the stage computes, at most, while one is beyond it.
    max_ahead: int = 1 << 30
    # Gradient reduction after the last backward: per layer, and beside the layers.
    reduce_layer_s: float = 0.0
    reduce_ends_s: float = 0.0
    # Seconds lost on the way from the previous stage, and again on the way back.
    hop_s: float = 0.0
    # Seconds for which all messages occupy that link.
    wire_s: float = 0.0
    # Least number of layers.
    min_layers: int = 0


def layers_within_time(
    stages: Sequence[StageLimit], num_layers: int, micro_batches: int, time_s: float, end_s: float = 0.0
) -> bool:
    """Return False only if no split of `num_layers` finishes `micro_batches` within `time_s`.

    `end_s` is the least time after the last backward pass of the first stage that holds layers.
    """
    low = [one.min_layers for one in stages]
    high = [len(one.seconds) for one in stages]
    if any(least > most for least, most in zip(low, high, strict=True)) or sum(high) < num_layers:
        return False
    for _ in range(MAX_ROUNDS):
        before = list(high)
        if not _tighten_bounds(stages, num_layers, micro_batches, time_s, end_s, low, high):
            return False
        spare = sum(high) - num_layers
        raised = [max(least, most - spare) for least, most in zip(low, high, strict=True)]
        if high == before and raised == low:
            break
        low = raised
    return True


def _tighten_bounds(
    stages: Sequence[StageLimit],
    num_layers: int,
    micro_batches: int,
    time_s: float,
    end_s: float,
    low: Sequence[int],
    high: list[int],
) -> bool:
    """Lower the upper bounds `high` in place; False if the stages hold too few layers."""
    limit_s = time_s * ROUNDING_MARGIN
    passes_s = [one.seconds[n - 1] if n else 0.0 for one, n in zip(stages, low, strict=True)]
    fastest_after = [*itertools.accumulate((one.layer_s for one in reversed(stages)), min)][::-1]
    room, after, later_s = sum(high), sum(high), sum(passes_s)
    hops_after_s = 2 * sum(one.hop_s for one in stages[1:])
    before_s = hops_before_s = first_reduce_s = 0.0
    forward_least = min(one.min_forward_share for one in stages)
    fastest_s = math.inf
    for place, one in enumerate(stages):
        layer_s, pass_s, most = one.layer_s, passes_s[place], high[place]
        later_s -= pass_s
        if place and one.hop_s:
            hops_before_s, hops_after_s = hops_before_s + 2 * one.hop_s, hops_after_s - 2 * one.hop_s
        earlier = num_layers - after
        if earlier > 0 and place and earlier * fastest_s > before_s:
            before_s = earlier * fastest_s
        after -= most
        rest_s = later_s
        beyond = num_layers - (room - after)
        if beyond > 0:
            if not after:
                return False
            if beyond * fastest_after[place + 1] > rest_s:
                rest_s = beyond * fastest_after[place + 1]
        if before_s + one.wire_s + pass_s + rest_s > limit_s:
            return False
        left_s = limit_s - before_s - hops_before_s - end_s - first_reduce_s
        each_s = _max_pass_s(one, micro_batches, left_s, rest_s + hops_after_s)
        own_s = limit_s - hops_before_s / 2 - forward_least * before_s - one.reduce_ends_s
        if not place:
            own_s -= end_s
            first_reduce_s = low[0] * one.reduce_layer_s
        most = _max_layers(one, most, micro_batches, each_s, own_s)
        if most < low[place]:
            return False
        room += most - high[place]
        high[place] = most
        before_s += pass_s
        if layer_s < fastest_s:
            fastest_s = layer_s
    return room >= num_layers


def _max_layers(
    stage: StageLimit, max_layers: int, micro_batches: int, pass_limit_s: float, total_limit_s: float
) -> int:
    """Return the most layers, up to `max_layers`, with passes within `pass_limit_s` and work in `total_limit_s`."""
    seconds = stage.seconds
    if max_layers and seconds[max_layers - 1] > pass_limit_s:
        max_layers = bisect_right(seconds, pass_limit_s, 0, max_layers)
    while max_layers and micro_batches * seconds[max_layers - 1] + max_layers * stage.reduce_layer_s > total_limit_s:
        max_layers -= 1
    return max_layers


def _max_pass_s(stage: StageLimit, micro_batches: int, available_s: float, downstream_s: float) -> float:
    """Return the longest pass of a stage with `available_s` for all passes and `downstream_s` for later stages."""
    ahead = stage.max_ahead if stage.max_ahead < micro_batches else micro_batches - 1
    each_s = available_s / micro_batches
    idle_s = (available_s - downstream_s) / (micro_batches - ahead * stage.max_forward_share)
    if idle_s < each_s:
        each_s = idle_s
    if micro_batches > ahead + 1:  # the waits for the first and the last micro-batch do not overlap
        twice_s = (available_s - 2 * downstream_s) / (micro_batches - ahead)
        if twice_s < each_s:
            each_s = twice_s
    return each_s
