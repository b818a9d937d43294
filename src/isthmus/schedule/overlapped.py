"""`overlapped`: 1F1B with every exchange behind computing, and `warm_up_counts`, which sizes it."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

from isthmus.core.errors import PlanError
from isthmus.schedule.exchanges import lay_exchanges, require_counts
from isthmus.schedule.operation import Operation, Schedule


def overlapped(
    num_stages: int, num_micro_batches: int, warm_up: Sequence[int] | None = None, receive_ahead: int = 1
) -> Schedule:
    """Warm up with many forwards, then one forward and one backward in turn, then the backwards that remain.

    `warm_up[s]` forwards come before the first forward-backward pair of stage `s` (capped at the number of
    micro-batches); at most `warm_up[s] + 1` micro-batches are in flight there. Without it, stage `s` warms up
    with `2 (num_stages - s - 1)`: enough to hide exchanges of up to half a micro-batch's computing each way.
    `receive_ahead` receives beyond the next one are posted before every computation. Source: cross-domain
    pooling report, section 4.2.1. Raises `PlanError` if a stage warms up with more than the one before it:
    such a pipeline waits for ever.
    """
    require_counts(num_stages, num_micro_batches)
    if warm_up is None:
        warm_up = [2 * (num_stages - s - 1) for s in range(num_stages)]
    if len(warm_up) != num_stages or min(warm_up) < 0:
        raise PlanError(f"warm-up counts {list(warm_up)} for {num_stages} stages", hint="one each, from 0 on")
    counts = [min(count, num_micro_batches) for count in warm_up]
    if any(after > before for before, after in itertools.pairwise(counts)):
        raise PlanError(
            f"warm-up counts {counts} rise", hint="a stage can warm up with what it was sent only"
        )
    stages = tuple(_order(count, num_micro_batches) for count in counts)
    return lay_exchanges(Schedule("overlapped", num_micro_batches, stages), receive_ahead)


def warm_up_counts(
    pass_s: Sequence[float],
    hop_s: Sequence[float],
    num_micro_batches: int,
    max_in_flight: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return how many forwards each stage must warm up with so that the pipeline keeps its best pace.

    `pass_s[s]` is the seconds of a forward and a backward of one micro-batch at stage `s`; `hop_s[s]` those
    of one exchange, transfer and delay, between stages `s` and `s + 1`, each way. To go at a pace of `p`
    seconds per micro-batch, stage `s` must be ahead of the next by what passes while a gradient comes, is
    used, and the next forward goes: (pass + 2 hop) / p forwards, rounded up. The pace is that of the slowest
    stage, or the best that keeps within `max_in_flight[s]` micro-batches (what fits in memory, at least 1).
    """
    require_counts(len(pass_s), num_micro_batches)
    if len(hop_s) != len(pass_s) - 1:
        raise PlanError(f"{len(hop_s)} hops between {len(pass_s)} stages", hint="one between each pair")
    if max_in_flight is not None and (len(max_in_flight) != len(pass_s) or min(max_in_flight) < 1):
        raise PlanError(f"max_in_flight is {list(max_in_flight)}", hint="one per stage, at least 1")
    rounds_s = [own_s + 2 * there_s for own_s, there_s in zip(pass_s, hop_s, strict=False)]
    limits = max_in_flight or [num_micro_batches] * len(pass_s)
    most = [n - 1 if n < num_micro_batches else math.inf for n in limits]
    slowest_s = max(pass_s)
    paces_s = {slowest_s, *(round_s / k for round_s in rounds_s for k in range(1, num_micro_batches + 1))}
    candidates_s = sorted(pace_s for pace_s in paces_s if pace_s >= slowest_s and pace_s > 0)
    fitting = bisect_left(candidates_s, True, key=lambda pace_s: _fit(_ahead(rounds_s, pace_s), most))
    pace_s = candidates_s[min(fitting, len(candidates_s) - 1)] if candidates_s else math.inf
    wanted = _ahead(rounds_s, pace_s)
    bounded = (int(min(w, n, num_micro_batches)) for w, n in zip(wanted, most, strict=True))
    return tuple(itertools.accumulate(bounded, min))


def _ahead(rounds_s: Sequence[float], pace_s: float) -> list[int]:
    """Return the warm-up of every stage at a pace: what it must be ahead of the last one."""
    steps = [max(1, math.ceil(round_s / pace_s - 1e-9)) for round_s in rounds_s]
    return [sum(steps[stage:]) for stage in range(len(steps) + 1)]


def _fit(counts: Sequence[int], most: Sequence[float]) -> bool:
    return all(count <= limit for count, limit in zip(counts, most, strict=True))


def _order(warm_up: int, total: int) -> tuple[Operation, ...]:
    order = [Operation("forward", m) for m in range(warm_up)]
    for i in range(total - warm_up):
        order += [Operation("forward", warm_up + i), Operation("backward", i)]
    return (*order, *(Operation("backward", m) for m in range(total - warm_up, total)))
