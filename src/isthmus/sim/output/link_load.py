"""`link_load`: the share of time in which messages between stages occupy each link, over the run."""

from __future__ import annotations

from isthmus.sim.simulation_result import SimulationResult

NUM_BINS = 240
"""Intervals of equal length into which the run is divided."""


def link_load(run: SimulationResult, num_bins: int = NUM_BINS) -> dict[tuple[str, str], tuple[float, ...]]:
    """Return by (source, target) the busy share, 0 to 1, in each of `num_bins` intervals of the run.

    A link is busy from the start of a message on it until its last byte has left. Messages that share it count once.
    Gradient reduction between replicas has no messages here; `LinkResult.utilisation` includes it.
    """
    busy: dict[tuple[str, str], list[tuple[float, float]]] = {(one.source, one.target): [] for one in run.links}
    for message in run.message_traces:
        busy.setdefault((message.source, message.target), []).append((message.started_s, message.left_s))
    return {ends: _shares(sorted(times), run.total_s, num_bins) for ends, times in busy.items()}


def _shares(intervals: list[tuple[float, float]], total_s: float, num_bins: int) -> tuple[float, ...]:
    """Return the covered share of each bin by the union of `intervals`, which are sorted."""
    shares = [0.0] * num_bins
    if total_s <= 0:
        return tuple(shares)
    width_s, covered_s = total_s / num_bins, 0.0
    for start_s, end_s in intervals:
        begin_s, end_s = max(start_s, covered_s), min(end_s, total_s)
        covered_s = max(covered_s, end_s)
        for place in range(int(begin_s / width_s), min(int(end_s / width_s) + 1, num_bins)):
            inside_s = min(end_s, (place + 1) * width_s) - max(begin_s, place * width_s)
            shares[place] += max(inside_s, 0.0) / width_s
    return tuple(min(share, 1.0) for share in shares)
