"""`island_options`: the chains that an island beside others may be, bounded but not yet cut."""

from __future__ import annotations

import math

from isthmus.plan.search.chains.chain_shape import Cost
from isthmus.plan.search.chains.enumerate_chains import Chains
from isthmus.plan.search.compose.compose import Option, Options

OPEN = 32
"""Options of an island that are compared at once with those of others."""


def island_options(chains: Chains, schedule: str, time_s: float) -> Options:
    """Return the chains of an island as options, those first that end most micro-batches in a time.

    An infinite time stands for the least in which a chain alone ends all of them.
    """
    if time_s == math.inf:
        total = chains.micro_batches
        alone = chains.ranked(lambda dp, first_s, pace_s: first_s + total / dp * pace_s)
        time_s, _ = next(alone, (0.0, None))

    def worth(dp: int, first_s: float, pace_s: float) -> float:
        if time_s < first_s:
            return first_s - time_s
        more = (time_s - first_s) / pace_s
        whole = math.floor(more + 1e-9)
        return -(dp * (1 + whole) + (more - whole) / 2)

    ranked = chains.ranked(worth)
    return Options(
        (Option(one.made(schedule), Cost(one.first_s, one.pace_s), chains.island) for _, one in ranked), OPEN
    )
