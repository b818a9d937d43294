"""`overlapped`: 1F1B with communication overlapped by computation, and its sizing, `warm_up_counts`."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

from isthmus.core.errors import PlanError
from isthmus.schedule.add_communication import add_communication, require_counts
from isthmus.schedule.operation import Operation, Schedule


def overlapped(
    num_stages: int, num_micro_batches: int, warm_up: Sequence[int] | None = None, receive_ahead: int = 1
) -> Schedule:
    """Return 1F1B with a longer warm-up: forwards, then forward-backward pairs, then the remaining backwards.

    Stage `s` runs `warm_up[s]` forwards before its first pair (at most the number of micro-batches) and has
    at most `warm_up[s] + 1` micro-batches in flight. The default, `2 (num_stages - s - 1)`, hides transfers
    of up to half a micro-batch's compute time each way. `receive_ahead` receives beyond the next one are
    posted before every computation. Source: cross-domain pooling report, section 4.2.1. Raises `PlanError` if
    a stage warms up with more forwards than the previous stage: such a pipeline deadlocks.
    """
    require_counts(num_stages, num_micro_batches)
    if warm_up is None:
        warm_up = [2 * (num_stages - s - 1) for s in range(num_stages)]
    if len(warm_up) != num_stages or min(warm_up) < 0:
        raise PlanError(f"warm-up counts {list(warm_up)} for {num_stages} stages", hint="one per stage, at least 0")
    counts = [min(count, num_micro_batches) for count in warm_up]
    if any(after > before for before, after in itertools.pairwise(counts)):
        raise PlanError(
            f"warm-up counts {counts} increase", hint="no stage can warm up with more than the previous one"
        )
    stages = tuple(_stage_order(count, num_micro_batches) for count in counts)
    return add_communication(Schedule("overlapped", num_micro_batches, stages), receive_ahead)


def warm_up_counts(
    pass_s: Sequence[float],
    hop_s: Sequence[float],
    num_micro_batches: int,
    max_in_flight: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the warm-up forwards of each stage with which the pipeline reaches its best pace, (num_stages,).

    `pass_s[s]` is the time of a forward and a backward of one micro-batch at stage `s`; `hop_s[s]` the time
    of one message (transfer and delay) between stages `s` and `s + 1`, each way. At a pace of `p` seconds per
    micro-batch, stage `s` must lead the next stage by the round trip of a gradient and a forward: ceil((pass
    + 2 hop) / p) forwards. The pace is that of the slowest stage, or the best at which stage `s` has at most
    `max_in_flight[s]` micro-batches in flight (its memory limit, at least 1).
    """
    require_counts(len(pass_s), num_micro_batches)
    if len(hop_s) != len(pass_s) - 1:
        raise PlanError(f"{len(hop_s)} hops between {len(pass_s)} stages", hint="one per pair of neighbours")
    if max_in_flight is not None and (len(max_in_flight) != len(pass_s) or min(max_in_flight) < 1):
        raise PlanError(f"max_in_flight is {list(max_in_flight)}", hint="one per stage, at least 1")
    rounds_s = [own_s + 2 * there_s for own_s, there_s in zip(pass_s, hop_s, strict=False)]
    limits = max_in_flight or [num_micro_batches] * len(pass_s)
    most = [n - 1 if n < num_micro_batches else math.inf for n in limits]
    slowest_s = max(pass_s)
    paces_s = {slowest_s, *(round_s / k for round_s in rounds_s for k in range(1, num_micro_batches + 1))}
    candidates_s = sorted(pace_s for pace_s in paces_s if pace_s >= slowest_s and pace_s > 0)
    fitting = bisect_left(
        candidates_s, True, key=lambda pace_s: _within_limits(_warm_up_at_pace(rounds_s, pace_s), most)
    )
    pace_s = candidates_s[min(fitting, len(candidates_s) - 1)] if candidates_s else math.inf
    wanted = _warm_up_at_pace(rounds_s, pace_s)
    bounded = (int(min(w, n, num_micro_batches)) for w, n in zip(wanted, most, strict=True))
    return tuple(itertools.accumulate(bounded, min))


def _warm_up_at_pace(rounds_s: Sequence[float], pace_s: float) -> list[int]:
    """Return the warm-up of every stage at a pace: its lead over the last stage, (num_stages,)."""
    steps = [max(1, math.ceil(round_s / pace_s - 1e-9)) for round_s in rounds_s]
    return [sum(steps[stage:]) for stage in range(len(steps) + 1)]


def _within_limits(counts: Sequence[int], limits: Sequence[float]) -> bool:
    return all(count <= limit for count, limit in zip(counts, limits, strict=True))


def _stage_order(warm_up: int, num_micro_batches: int) -> tuple[Operation, ...]:
    order = [Operation("forward", m) for m in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        order += [Operation("forward", warm_up + i), Operation("backward", i)]
    return (
        *order,
        *(Operation("backward", m) for m in range(num_micro_batches - warm_up, num_micro_batches)),
    )
