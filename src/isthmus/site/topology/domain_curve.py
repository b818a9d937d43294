"""`DomainCurves`: the least cost of placing n pieces in a domain, for each n that it holds, and where they then are.

A piece is cards of one node. The curve of a domain is the min-plus sum of its children's curves, and of its own cost.
Equal nodes, and equal whole domains, need one curve: of these at most one is used in part by a cheapest placement,
since moving pieces from one into another empties the one or fills the other, and neither costs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from isthmus.site.topology.curve_sums import Curve, add_curve, add_equal, empty_curve
from isthmus.site.topology.free_cards import FreeCards, Signature
from isthmus.site.topology.gang_cost import INFEASIBLE, GangCost
from isthmus.site.topology.node_sum import NodeSum


class DomainCurves:
    """Curves of `free` for pieces of `piece_cards` cards, up to `most` of them, by `cost`.

    At level `unit_level` only multiples of `unit_pieces` are placed, so that units stay whole; above it curves count
    units. `known` keeps curves by signature, between calls that have the same other arguments.
    """

    def __init__(
        self,
        free: FreeCards,
        cost: GangCost,
        *,
        piece_cards: int,
        most: int,
        unit_level: int = -1,
        unit_pieces: int = 1,
        known: dict[tuple[int, Signature], Curve] | None = None,
    ) -> None:
        self.free, self.cost, self.piece_cards, self.most = free, cost, piece_cards, most
        self.unit_level, self.unit_pieces = unit_level, unit_pieces
        self._known = {} if known is None else known

    def at(self, level: int, domain: int) -> Curve:
        """Return the curve of a domain; above `unit_level` and at it in units, below it in pieces."""
        key = level, self.free.signature(level, domain)
        if key not in self._known:
            self._known[key] = self._make(level, domain)
        return self._known[key]

    def cards_of(self, level: int, count: int) -> int:
        """Return the cards of `count` pieces, or units from `unit_level` on."""
        return count * self.piece_cards * (self.unit_pieces if level >= self.unit_level >= 0 else 1)

    def most_at(self, level: int) -> int:
        """Return the largest count that curves of `level` need."""
        return self.most // self.unit_pieces if level >= self.unit_level >= 0 else self.most

    def _make(self, level: int, domain: int) -> Curve:
        children = self.free.tree.children[level][domain]
        if level == 0:
            curve = NodeSum(self.free, children, self.cost, self.piece_cards, self.most).curve
        else:
            curve = self._over_domains(level - 1, children)
        if level == self.unit_level and self.unit_pieces > 1:
            curve = curve[:: self.unit_pieces]
        return self._with_own_cost(level, domain, curve)

    def _with_own_cost(self, level: int, domain: int, curve: Curve) -> Curve:
        """Add what the domain itself costs: that it is used, used in part, and what stays free in it."""
        tree, name = self.free.tree, self.free.tree.levels[level]
        num_free, size = self.free.sums[level][domain], tree.domain_cards[level][domain]
        left = num_free - np.arange(len(curve), dtype=np.int64) * self.cards_of(level, 1)
        own = self.cost.spans.get(name, 0) + self.cost.left.get(name, 0) * np.maximum(left, 0)
        if num_free == size:
            own = own + self.cost.breaks.get(name, 0) * (left > 0)
        made: Curve = np.minimum(curve + own, INFEASIBLE)
        made[0] = 0
        return made

    def _over_domains(self, level: int, domains: Sequence[int]) -> Curve:
        curves = [(whole, num, curve) for whole, num, _, curve in self.grouped(level, domains)]
        room = min(self.most_at(level), sum(num * (len(curve) - 1) for _, num, curve in curves))
        total = empty_curve(room)
        for whole, num, curve in curves:
            if whole and num > 1:
                total = add_equal(total, curve, num)
            else:
                for _ in range(num):
                    total = add_curve(total, curve)
        return total

    def grouped(self, level: int, domains: Sequence[int]) -> Iterator[tuple[bool, int, list[int], Curve]]:
        """Yield domains with equal signatures: whether they are whole, their number, themselves, and their curve."""
        sums, sizes = self.free.sums[level], self.free.tree.domain_cards[level]
        alike: dict[Signature, list[int]] = {}
        for domain in domains:
            if sums[domain] >= self.piece_cards:
                alike.setdefault(self.free.signature(level, domain), []).append(domain)
        for members in alike.values():
            curve = self.at(level, members[0])
            if len(curve) > 1:
                yield sums[members[0]] == sizes[members[0]], len(members), members, curve
