"""The closed form of a 1F1B iteration: its pace and its length, from stage times and hops."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.core.plan import StageTime


def cycle_s(times: Sequence[StageTime], hop_s: Sequence[float]) -> float:
    """Return a lower bound on the pace of 1F1B, seconds per micro-batch.

    Stage `i` of `S` has `S - i` micro-batches under way, and each comes back only after it has been through
    all later stages: so the pace is bounded by the slowest stage and by that round trip over its number in
    flight. `hop_s` is the time of one exchange at each boundary (0 inside a cluster).
    """
    count = len(times)
    pace_s, later_s = 0.0, 0.0
    for i in reversed(range(count)):
        own_s = times[i].forward_s + times[i].backward_s
        later_s += own_s + (2 * hop_s[i] if i < count - 1 else 0.0)
        pace_s = max(pace_s, own_s, later_s / (count - i))
    return pace_s


def iteration_estimate_s(times: Sequence[StageTime], hop_s: Sequence[float], micro_batches: int) -> float:
    """Return a quick estimate of a 1F1B step, used to rank candidates before they are simulated."""
    round_s = sum(t.forward_s + t.backward_s for t in times) + 2 * sum(hop_s)
    return round_s + (micro_batches - 1) * cycle_s(times, hop_s)
