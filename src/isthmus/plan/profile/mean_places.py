"""`mean_places`: over how many nodes or chips the experts of one token lie on average."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import comb


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token chooses `chosen` of `experts`: evenly, or evenly among those of `chosen_groups` of `groups`."""

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1


@cache
def mean_places(places: int, routing: Routing) -> float:
    """Return over how many of `places`, which hold equally many experts in order, those of a token lie on average.

    A token misses a place of n of E experts with the probability C(E - n, k) / C(E, k), if it chooses k of E evenly.
    A router limited to M of G groups (DeepSeek-V3, section 2.1.2, at most M nodes) chooses the k among M E / G: a place
    of g groups has j of the chosen with C(g, j) C(G - g, M - j) / C(G, M). A place that cuts groups has the mean of the
    two next whole numbers of them, weighted.
    """
    experts_per_group = routing.experts / routing.groups
    here = routing.groups / places
    if here < 1:
        met = routing.chosen_groups / routing.groups
        missed = 1 - met * (1 - _missed(routing, routing.experts / places))
    else:
        whole, part = int(here), here - int(here)
        missed = (1 - part) * _missed_groups(routing, whole, experts_per_group)
        missed += part * _missed_groups(routing, whole + 1, experts_per_group) if part else 0.0
    return places * (1 - missed)


def _missed_groups(routing: Routing, here: int, experts_per_group: float) -> float:
    """Return the probability that no expert of a token is in a place of `here` groups."""
    groups, chosen = routing.groups, routing.chosen_groups
    return sum(
        comb(here, j) * comb(groups - here, chosen - j) / comb(groups, chosen) * _missed(routing, j * experts_per_group)
        for j in range(min(here, chosen) + 1)
    )


def _missed(routing: Routing, num_experts: float) -> float:
    """Return the probability that a token chooses none of `num_experts` of those that it chooses from."""
    open_to = routing.experts * routing.chosen_groups / routing.groups
    missed = 1.0
    for index in range(routing.chosen):
        missed *= max(0.0, open_to - num_experts - index) / (open_to - index)
    return missed
