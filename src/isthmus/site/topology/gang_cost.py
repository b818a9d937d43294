"""`gang_cost`: what a placement costs, as one integer whose order is that of its fields one after another.

Each field is a sum over nodes and domains, so that the cheapest placement of a domain is made of cheapest placements of
its children: minimal sums are found by dynamic programming, and integers keep the order of fields under addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.site.topology.site_tree import SPINE, SiteTree

Aim = Literal["packed", "close", "spread"]
"""`packed`: fill what is broken first; `close`: fewest domains first; `spread`: as `close`, on the emptiest domains."""

NODE = "node"
INFEASIBLE = 1 << 61
_BITS = 60


@dataclass(frozen=True)
class GangCost:
    """Weight of each field: `spans` for a domain or node that is used, `breaks` for a whole free one that is used in
    part, `left` for a card that stays free in a used one. Fields without a weight are not looked at.
    """

    spans: Mapping[str, int]
    breaks: Mapping[str, int]
    left: Mapping[str, int]


def gang_cost(tree: SiteTree, piece_cards: int, num_pieces: int, aim: Aim, *, is_small: bool) -> GangCost:
    """Return the weights for up to `num_pieces` pieces of `piece_cards` cards.

    A part that `is_small` fits a node: it is placed on few nodes and fills broken ones. Larger parts fill broken
    domains, so that whole ones stay for later (cloud-native AI white paper, 3.2.1). The least fields are left out where
    60 bits do not hold them all.
    """
    whole_nodes = 2 * piece_cards > tree.max_cards
    levels = [*reversed(tree.levels)]
    inner = [level for level in levels if level != SPINE]
    spans = [("spans", level) for level in inner] + ([] if whole_nodes else [("spans", NODE)])
    breaks = [("breaks", level) for level in inner] + ([] if piece_cards == tree.max_cards else [("breaks", NODE)])
    left = [("left", NODE)] if is_small and not whole_nodes else []
    left += [("left", level) for level in reversed(inner)]
    order = [("spans", SPINE)] if SPINE in levels else []
    order += [*spans, *breaks, *left] if is_small or aim != "packed" else [*breaks, *spans, *left]
    if aim == "spread":
        order = [field for field in order if field[0] != "left"]
    weights: dict[str, dict[str, int]] = {"spans": {}, "breaks": {}, "left": {}}
    bits = [_field_bits(tree, field, num_pieces) for field in order]
    while sum(bits) > _BITS:
        bits.pop()
        order.pop()
    shift = sum(bits)
    for (kind, level), size in zip(order, bits, strict=True):
        shift -= size
        weights[kind][level] = 1 << shift
    return GangCost(**weights)


def _field_bits(tree: SiteTree, field: tuple[str, str], num_pieces: int) -> int:
    """Return the bits that hold every sum of a field."""
    kind, level = field
    sizes: Sequence[int] = tree.cards if level == NODE else tree.domain_cards[tree.levels.index(level)]
    used = min(num_pieces, len(sizes))
    most = min(sum(tree.cards), used * max(sizes, default=0)) if kind == "left" else used
    return max(1, most).bit_length()
