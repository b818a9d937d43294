"""`island_options`: the bounded pipelines of a replica group that trains beside others."""

from __future__ import annotations

import math

from isthmus.plan.search.chains.chain_shape import Cost
from isthmus.plan.search.chains.enumerate_chains import Chains
from isthmus.plan.search.compose.compose import Option, Options

OPEN = 32
"""Options of a group that are compared at once with those of other groups."""


def island_options(chains: Chains, schedule: str, time_s: float) -> Options:
    """Return the pipelines of a group as options, those that finish most micro-batches within `time_s` first.

    Infinite `time_s` stands for the least time in which one pipeline alone finishes all of them.
    """
    if time_s == math.inf:
        total = chains.micro_batches
        alone = chains.ranked(lambda dp, first_s, interval_s: first_s + total / dp * interval_s)
        time_s, _ = next(alone, (0.0, None))

    def worth(dp: int, first_s: float, interval_s: float) -> float:
        if time_s < first_s:
            return first_s - time_s
        more = (time_s - first_s) / interval_s
        whole = math.floor(more + 1e-9)
        return -(dp * (1 + whole) + (more - whole) / 2)

    ranked = chains.ranked(worth)
    return Options(
        (Option(one.made(schedule), Cost(one.first_s, one.pace_s), chains.island) for _, one in ranked), OPEN
    )
