"""Closed forms of the pace and the iteration time of 1F1B, plain or interleaved, from stage times and hops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StagePasses(Protocol):
    """Seconds of the passes of one micro-batch at a stage."""

    @property
    def forward_s(self) -> float:
        """Seconds of a forward pass."""

    @property
    def backward_s(self) -> float:
        """Seconds of a backward pass."""


def micro_batch_interval_s(times: Sequence[StagePasses], hop_s: Sequence[float]) -> float:
    """Return a lower bound on the steady-state seconds per micro-batch of 1F1B.

    Stage `i` of `S` has `S - i` micro-batches in flight, and each returns only after a round trip through all
    later stages. The pace is therefore bounded by the slowest stage and by each round trip over its number in
    flight. `hop_s`, (num_stages - 1,), is the time of one message at each boundary (0 inside a cluster).
    """
    count = len(times)
    pace_s, later_s = 0.0, 0.0
    for i in reversed(range(count)):
        own_s = times[i].forward_s + times[i].backward_s
        later_s += own_s + (2 * hop_s[i] if i < count - 1 else 0.0)
        pace_s = max(pace_s, own_s, later_s / (count - i))
    return pace_s


def iteration_estimate_s(
    times: Sequence[StagePasses], hop_s: Sequence[float], micro_batches: int, num_chunks: int = 1
) -> float:
    """Return a quick estimate of the seconds of a 1F1B step, to rank candidates before simulating them.

    Interleaved chunks fill and drain the pipeline in 1 / `num_chunks` of the time (D. Narayanan et al., Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021, section 2.2.2).
    """
    round_s = sum(t.forward_s + t.backward_s for t in times) + 2 * sum(hop_s)
    interval_s = micro_batch_interval_s(times, hop_s)
    return micro_batches * interval_s + (round_s - interval_s) / num_chunks
