"""`unit_kinds`: the units of a request by size, cut into pieces that fit a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_request import GangRequest, GangUnit, RankId
from isthmus.site.topology.site_tree import SiteTree


@dataclass(frozen=True)
class UnitKind:
    """Units of `num_pieces` pieces of `piece_cards` cards; each piece is on one node."""

    piece_cards: int
    num_pieces: int
    units: Sequence[Sequence[RankId]]

    @property
    def unit_cards(self) -> int:
        """Cards of a unit."""
        return self.piece_cards * self.num_pieces


def unit_kinds(tree: SiteTree, request: GangRequest) -> tuple[list[UnitKind], int]:
    """Return the units by size, largest first, and how many must be split because no super-node holds them."""
    found: dict[tuple[int, int], list[Sequence[RankId]]] = {}
    split = 0
    for unit in request.units:
        size, num = _pieces(tree, unit)
        ranks = list(unit.ranks)
        if num > 1 and not _fits_empty(tree, size, num):
            split += 1
            each = len(ranks) // num
            found.setdefault((size, 1), []).extend(ranks[at : at + each] for at in range(0, len(ranks), each))
        else:
            found.setdefault((size, num), []).append(ranks)
    kinds = [UnitKind(size, num, units) for (size, num), units in found.items()]
    return sorted(kinds, key=lambda kind: (-kind.unit_cards, -kind.piece_cards)), split


def _pieces(tree: SiteTree, unit: GangUnit) -> tuple[int, int]:
    """Return the cards of a piece and the number of pieces of a unit: the fewest equal ones that fit a node."""
    sizes = set(unit.ranks.values())
    if unit.num_cards <= tree.max_cards or len(unit.ranks) == 1:
        return unit.num_cards, 1
    largest, num_ranks = max(sizes), len(unit.ranks)
    if len(sizes) == 1:
        for num in range(2, num_ranks + 1):
            if num_ranks % num == 0 and num_ranks // num * largest <= tree.max_cards:
                return num_ranks // num * largest, num
    return largest, num_ranks


def _fits_empty(tree: SiteTree, size: int, num: int) -> bool:
    if tree.unit_level is None:
        return False
    return any(sum(tree.cards[node] // size for node in nodes) >= num for nodes in tree.members[tree.unit_level])


def num_fitting(free: FreeCards, piece_cards: int, num_pieces: int = 1) -> int:
    """Return how many units of `num_pieces` pieces fit: each piece on one node, each unit in one super-node."""
    tree, level = free.tree, free.tree.unit_level
    if num_pieces == 1 or level is None:
        return sum(num // piece_cards for num in free.counts) // num_pieces
    return sum(sum(free.counts[node] // piece_cards for node in nodes) // num_pieces for nodes in tree.members[level])
