"""`packing_bound`: which of some requests fill equal nodes best, if only the nodes' sizes count.

The number of nodes is a variable for each way to fill a node with units smaller than it (a pattern, as in the
cutting-stock problem of Gilmore and Gomory), and a request is placed whole or not: an integer program, which HiGHS
solves exactly. Domains above the node are left out, so no placement exceeds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from isthmus.site.topology.gang_request import GangRequest


def packing_bound(num_nodes: int, cards: int, requests: Sequence[GangRequest]) -> list[GangRequest]:
    """Return the requests of the largest volume whose units pack into `num_nodes` nodes of `cards` cards."""
    patterns = np.array(_patterns(cards, cards - 1))
    whole = [sum(unit.num_cards // cards for unit in one.units if unit.num_cards >= cards) for one in requests]
    rows = [np.concatenate([whole, np.ones(len(patterns))])]
    for size in range(1, cards):
        asked = [sum(unit.num_cards == size for unit in one.units) for one in requests]
        rows.append(np.concatenate([asked, -patterns[:, size - 1]]))
    highest = np.zeros(len(rows))
    highest[0] = num_nodes
    most = np.concatenate([np.ones(len(requests)), np.full(len(patterns), num_nodes)])
    found = milp(
        np.concatenate([[-one.num_cards for one in requests], np.zeros(len(patterns))]),
        constraints=LinearConstraint(np.array(rows, float), -np.inf, highest),
        integrality=np.ones(len(most)),
        bounds=Bounds(0, most),
        options={"mip_rel_gap": 0},
    )
    assert found.success, found.message
    return [one for one, share in zip(requests, found.x, strict=False) if share > 0.5]


def _patterns(room: int, largest: int) -> list[tuple[int, ...]]:
    """Return how many units of 1, 2, ... `largest` cards fit into `room` cards together, in all ways."""
    if not largest:
        return [()]
    return [
        (*smaller, number)
        for number in range(room // largest + 1)
        for smaller in _patterns(room - number * largest, largest - 1)
    ]
