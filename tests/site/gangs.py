"""Sites, requests, and the best placement by trying all, for the tests of placement inside a site."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_placement import GangPlacement, LevelScore, level_scores
from isthmus.site.topology.gang_request import GangRequest, GangUnit
from isthmus.site.topology.site_tree import SPINE, SUPER_NODE, TOR, CardLinkGroup, SiteTree

PAIRS = tuple(CardLinkGroup(cards=frozenset((at, at + 1)), gbps=400.0) for at in (0, 2, 4, 6))


def tree_of(
    num_nodes: int, cards: int = 8, *, tor: int = 0, super_node: int = 0, spine: int = 0,
    links: Sequence[CardLinkGroup] = (),
) -> SiteTree:  # fmt: skip
    """Return a site of equal nodes; `tor`, `super_node` and `spine` are the nodes of a domain, 0 for none."""
    names = [f"n{node:03d}" for node in range(num_nodes)]
    sizes = sorted(((super_node, SUPER_NODE), (tor, TOR)), key=lambda one: one[0])
    levels = {
        level: {f"{level}{at // size}": names[at : at + size] for at in range(0, num_nodes, size)}
        for size, level in (*sizes, (spine, SPINE))
        if size
    }
    return SiteTree.from_groups(dict.fromkeys(names, cards), levels, links)


def gang(num_units: int, ranks: int = 1, cards: int = 1) -> GangRequest:
    """Return a request of equal units: `ranks` ranks with `cards` cards each."""
    units = (
        GangUnit(ranks={unit * ranks + rank: cards for rank in range(ranks)}) for unit in range(num_units)
    )  # fmt: skip
    return GangRequest(units=tuple(units))


def busy(tree: SiteTree, taken: Sequence[int]) -> FreeCards:
    """Return the site with the lowest `taken[node]` cards of each node in use."""
    free = FreeCards(tree)
    for node, num in enumerate(taken):
        free.take(node, (1 << num) - 1)
    return free


def check_placement(free: FreeCards, request: GangRequest, found: GangPlacement) -> None:
    """Every rank has its number of free cards of one node, no card two ranks, and a unit lies in one super-node."""
    used: dict[int, int] = {}
    level = free.tree.unit_level
    for unit in request.units:
        for rank, num in unit.ranks.items():
            node, mask = found.places[rank]
            assert mask.bit_count() == num
            assert mask & ~free.masks[node] == 0
            assert used.get(node, 0) & mask == 0
            used[node] = used.get(node, 0) | mask
        nodes = {found.places[rank][0] for rank in unit.ranks}
        if unit.num_cards <= free.tree.max_cards:
            assert len(nodes) == 1
        elif level is not None and not found.split_units:
            assert len({free.tree.domains[level][node] for node in nodes}) == 1
    assert found.taken == used
    assert found.scores == level_scores(free, used)


def cost_key(scores: Sequence[LevelScore], request: GangRequest, tree: SiteTree, aim: str = "packed") -> list[int]:
    """Return what a placement is judged by, most important first, as `docs/design/site-placement.md` lists it."""
    of = {score.level: score for score in scores}
    inner = [level for level in reversed(tree.levels) if level != SPINE]
    spans = [of[level].used for level in (*inner, "node")]
    breaks = [of[level].broken for level in (*inner, "node")]
    is_small = request.num_cards <= tree.max_cards
    left = [of["node"].left_cards] if is_small else []
    left += [of[level].left_cards for level in reversed(inner)]
    first = [of[SPINE].used] if SPINE in of else []
    return [*first, *spans, *breaks, *left] if is_small or aim == "close" else [*first, *breaks, *spans, *left]


def best_by_trying_all(free: FreeCards, request: GangRequest, aim: str = "packed") -> list[int] | None:
    """Return the least `cost_key` over all ways to spread equal units over the nodes; None if there is none."""
    tree, unit = free.tree, request.units[0]
    size = next(iter(unit.ranks.values()))
    piece, num = unit.num_cards, 1
    if piece > tree.max_cards:
        per_piece = max(n for n in range(1, len(unit.ranks)) if len(unit.ranks) % n == 0 and n * size <= tree.max_cards)
        piece, num = per_piece * size, len(unit.ranks) // per_piece
    best = None
    for counts in _spreads([free.counts[node] // piece for node in range(len(tree.nodes))], len(request.units) * num):
        if num > 1 and tree.unit_level is not None:
            inside = [sum(counts[node] for node in nodes) for nodes in tree.members[tree.unit_level]]
            if any(total % num for total in inside):
                continue
        taken = {node: (1 << count * piece) - 1 for node, count in enumerate(counts) if count}
        key = cost_key(level_scores(free, taken), request, tree, aim)
        best = key if best is None else min(best, key)
    return best


def _spreads(most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `total` as a sum of numbers up to `most`."""
    if not most:
        if total == 0:
            yield ()
        return
    rest = list(itertools.accumulate(reversed(most)))[::-1]
    if total > rest[0]:
        return
    for first in range(min(most[0], total) + 1):
        for others in _spreads(most[1:], total - first):
            yield (first, *others)


def num_spreads(most: Sequence[int], total: int) -> int:
    """Return how many ways `best_by_trying_all` tries for `total` pieces on nodes that hold `most`."""
    ways = [1] + [0] * total
    for num in most:
        ways = [sum(ways[max(0, at - num) : at + 1]) for at in range(total + 1)]
    return ways[total]
