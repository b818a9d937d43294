"""`place_gang`: the nodes and cards of a part at a site, for all of its ranks or for none.

White paper on cloud-native AI, 3.2.1: gang, card topology, super-nodes, ToR affinity, and bin-packing on two levels.
Equal units are placed at least cost (`gang_cost`), which is exact; units of different sizes one size after the other,
the largest first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.site.topology.best_cards import best_cards
from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_cost import Aim, gang_cost
from isthmus.site.topology.gang_placement import GangPlacement, GangRefusal, level_scores
from isthmus.site.topology.gang_request import GangRequest, RankId
from isthmus.site.topology.site_tree import SUPER_NODE
from isthmus.site.topology.unit_kinds import UnitKind, num_fitting, unit_kinds

if TYPE_CHECKING:
    from isthmus.site.topology.choose_nodes import UnitNodes
    from isthmus.site.topology.domain_curve import DomainCurves

MANY_PIECES = 512
"""Pieces beyond which those that share a node are placed as one."""

_MAX_MEMORY = 512


def place_gang(free: FreeCards, request: GangRequest, aim: Aim = "packed") -> GangPlacement | GangRefusal:
    """Return the cheapest placement of `request` on `free`, which stays as it is, or why there is none."""
    tree, sizes = free.tree, {rank: num for unit in request.units for rank, num in unit.ranks.items()}
    kinds, split = unit_kinds(tree, request)
    work, places = free, dict[RankId, tuple[int, int]]()
    for kind in kinds:
        chosen = _choose(work, kind, aim)
        if chosen is None:
            return _refusal(work, kind)
        if work is free and len(kinds) > 1:
            work = free.copy()
        on_nodes: dict[int, list[list[RankId]]] = {}
        for ranks, nodes in zip(kind.units, chosen, strict=True):
            each = len(ranks) // len(nodes)
            for at, node in enumerate(nodes):
                on_nodes.setdefault(node, []).append(list(ranks[at * each : (at + 1) * each]))
        for node, groups in on_nodes.items():
            masks = _cards_on_node(work, node, [{rank: sizes[rank] for rank in ranks} for ranks in groups])
            places |= {rank: (node, mask) for rank, mask in masks.items()}
            if work is not free:
                work.take(node, sum(masks.values()))
    taken: dict[int, int] = {}
    for node, mask in places.values():
        taken[node] = taken.get(node, 0) | mask
    ordered = {rank: places[rank] for unit in request.units for rank in unit.ranks}
    return GangPlacement(places=ordered, aim=aim, scores=level_scores(free, taken), split_units=split)


def _cards_on_node(free: FreeCards, node: int, groups: list[dict[RankId, int]]) -> dict[RankId, int]:
    """Return the cards of ranks that share a node: the best joined for each unit, and inside it for each rank."""
    links = free.tree.card_links
    found: dict[RankId, int] = {}
    for ranks, mask in zip(
        groups, best_cards(free.masks[node], [sum(ranks.values()) for ranks in groups], links), strict=True
    ):
        found |= dict(zip(ranks, best_cards(mask, list(ranks.values()), links), strict=True))
    return found


def _choose(free: FreeCards, kind: UnitKind, aim: Aim) -> list[UnitNodes] | None:
    from isthmus.site.topology.choose_nodes import choose_nodes  # loads numpy, which commands that place nothing spare

    num_units, size = len(kind.units), kind.piece_cards
    if num_fitting(free, size, kind.num_pieces) < num_units:
        return None
    per_node = free.tree.max_cards // size
    if kind.num_pieces == 1 and per_node > 1 and num_units > MANY_PIECES:
        found = _choose_in_nodes(free, size, per_node, num_units, aim)
        if found is not None:
            return found
    return choose_nodes(_curves(free, kind.piece_cards, kind.num_pieces, num_units, aim), num_units)


def _choose_in_nodes(free: FreeCards, size: int, per_node: int, num_units: int, aim: Aim) -> list[UnitNodes] | None:
    """Place many small units as full nodes, and the rest by itself; None if there are too few such nodes."""
    from isthmus.site.topology.choose_nodes import choose_nodes

    num_nodes, rest = divmod(num_units, per_node)
    if num_fitting(free, size * per_node) < num_nodes + (rest > 0):
        return None
    full = choose_nodes(_curves(free, size * per_node, 1, num_nodes, aim), num_nodes)
    if full is None:
        return None
    found = [unit for unit in full for _ in range(per_node)]
    if rest:
        left = free.copy()
        for (node,) in full:
            left.take(node, best_cards(left.masks[node], [size * per_node], ())[0])
        more = choose_nodes(_curves(left, size, 1, rest, aim), rest)
        if more is None:
            return None
        found += more
    return found


def _curves(free: FreeCards, piece_cards: int, num_pieces: int, num_units: int, aim: Aim) -> DomainCurves:
    from isthmus.site.topology.domain_curve import DomainCurves

    total = num_units * num_pieces
    most = (1 << (total - 1).bit_length()) if num_pieces == 1 else total
    is_small = total * piece_cards <= free.tree.max_cards
    cost = gang_cost(free.tree, piece_cards, most, aim, is_small=is_small)
    level = free.tree.unit_level if num_pieces > 1 else None
    memory = free.memory
    if len(memory) > _MAX_MEMORY:
        memory.clear()
    known = memory.setdefault((piece_cards, num_pieces, most, aim, is_small), {})
    return DomainCurves(
        free, cost, piece_cards=piece_cards, most=most, unit_level=-1 if level is None else level,
        unit_pieces=num_pieces, known=known,
    )  # fmt: skip


def _refusal(free: FreeCards, kind: UnitKind) -> GangRefusal:
    inside = SUPER_NODE if kind.num_pieces > 1 else "node"
    fitting = num_fitting(free, kind.piece_cards, kind.num_pieces)
    return GangRefusal(
        unit_cards=kind.unit_cards, wanted=len(kind.units), fitting=fitting, free_cards=free.total, inside=inside
    )
