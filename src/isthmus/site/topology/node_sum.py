"""`NodeSum`: the least cost of n pieces over some nodes, and the nodes that have them.

Nodes with equally many free cards are alike. At most one node is used in part: of two, moving pieces from one to the
other empties the one or fills the other, which costs no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.site.topology.curve_sums import Curve, add_copies, empty_curve, find_copies, lower
from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_cost import INFEASIBLE, NODE, GangCost


@dataclass(frozen=True)
class _Kind:
    """Nodes with `free` of `size` cards free, and the sums before and after them: all full, or one used in part."""

    free: int
    size: int
    members: Sequence[int]
    before: tuple[Curve, Curve]
    less: Curve
    after: tuple[Curve, Curve]


class NodeSum:
    """The sum over `nodes` of `free` for pieces of `piece_cards` cards, up to `most` of them."""

    def __init__(self, free: FreeCards, nodes: Sequence[int], cost: GangCost, piece_cards: int, most: int) -> None:
        self._cost, self._piece_cards = cost, piece_cards
        alike: dict[tuple[int, int], list[int]] = {}
        counts, cards = free.counts, free.tree.cards
        for node in nodes:
            if counts[node] >= piece_cards:
                alike.setdefault((counts[node], cards[node]), []).append(node)
        room = min(most, sum(num // piece_cards * len(members) for (num, _), members in alike.items()))
        full = empty_curve(room)
        part = np.full_like(full, INFEASIBLE)
        self._kinds: list[_Kind] = []
        for (num_free, size), members in sorted(alike.items()):
            holds, num = num_free // piece_cards, len(members)
            each = self.node_cost(num_free, size, holds)
            less = add_copies(full, holds, each, num - 1)
            part_after = add_copies(part, holds, each, num)
            part_after = part_after.copy() if part_after is part else part_after
            for pieces in range(1, min(holds, room + 1)):
                lower(part_after, less, pieces, self.node_cost(num_free, size, pieces))
            full_after = add_copies(less, holds, each, 1)
            self._kinds.append(_Kind(num_free, size, members, (full, part), less, (full_after, part_after)))
            full, part = full_after, part_after
        self.curve: Curve = np.minimum(full, part)
        self._ends = full, part

    def node_cost(self, num_free: int, size: int, num_pieces: int) -> int:
        """Return the cost of `num_pieces` pieces on a node with `num_free` of `size` cards free."""
        left = num_free - num_pieces * self._piece_cards
        breaks = self._cost.breaks.get(NODE, 0) if num_free == size and left else 0
        return self._cost.spans.get(NODE, 0) + breaks + self._cost.left.get(NODE, 0) * left

    def nodes_of(self, count: int) -> list[int]:
        """Return the node of each of `count` pieces of the cheapest placement, in order."""
        full, part = self._ends
        in_part, found = bool(part[count] < full[count]), list[int]()
        for kind in reversed(self._kinds):
            holds = kind.free // self._piece_cards
            each, members, num = self.node_cost(kind.free, kind.size, holds), list(kind.members), len(kind.members)
            target = int(kind.after[in_part][count])
            copies = find_copies(kind.before[in_part], count, holds, each, num, target)
            if copies is None:
                pieces = self._pieces_in_part(kind, count, holds, target)
                found += [members.pop(0)] * pieces
                count, in_part = count - pieces, False
                copies = find_copies(kind.before[0], count, holds, each, num - 1, int(kind.less[count]))
                if copies is None:
                    raise AssertionError("the sum of nodes has no origin")
            found += [node for node in members[:copies] for _ in range(holds)]
            count -= copies * holds
        return sorted(found)

    def _pieces_in_part(self, kind: _Kind, count: int, holds: int, target: int) -> int:
        for pieces in range(1, min(holds, count + 1)):
            if int(kind.less[count - pieces]) + self.node_cost(kind.free, kind.size, pieces) == target:
                return pieces
        raise AssertionError("the sum of nodes has no origin")
