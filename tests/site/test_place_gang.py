"""Placement of a gang inside a site: rules, and equality with the best of all placements on small sites."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_placement import GangPlacement, GangRefusal
from isthmus.site.topology.gang_request import GangRequest, GangUnit
from isthmus.site.topology.place_gang import place_gang
from isthmus.site.topology.site_tree import SPINE, SUPER_NODE, TOR, SiteTree
from tests.site.gangs import best_by_trying_all, busy, check_placement, cost_key, gang, num_spreads, tree_of

MAX_SPREADS = 600


def placed(free: FreeCards, request: GangRequest) -> GangPlacement:
    """Return the placement, after checking it."""
    found = place_gang(free, request)
    assert isinstance(found, GangPlacement), found
    check_placement(free, request, found)
    return found


def nodes_of(found: GangPlacement) -> list[int]:
    return sorted({node for node, _ in found.places.values()})


def test_all_ranks_get_cards_or_none_and_the_free_cards_stay_as_they_are() -> None:
    """A gang of five whole nodes on four waits with the reason, although cards for four are free."""
    free = busy(tree_of(4), [0, 0, 0, 1])
    found = place_gang(free, gang(4, cards=8))
    assert isinstance(found, GangRefusal)
    assert (found.wanted, found.fitting, found.free_cards, found.is_fragmented) == (4, 3, 31, False)
    assert found.reason == "4 x 8 cards, each inside one node: 3 fit, 31 cards are free"
    assert free.total == 31
    placed(free, gang(3, cards=8))
    assert free.total == 31


def test_a_part_smaller_than_a_node_fills_the_tightest_broken_node() -> None:
    """A whole node is not broken while a broken one holds the part; of two, the one with less left takes it."""
    free = busy(tree_of(6, tor=3), [0, 3, 5, 0, 0, 0])
    assert nodes_of(placed(free, gang(1, ranks=2))) == [2]
    assert nodes_of(placed(free, gang(1, ranks=5))) == [1]
    assert nodes_of(placed(free, gang(1, ranks=6))) == [0]


def test_a_part_larger_than_a_node_fills_broken_tors_and_spares_whole_ones() -> None:
    """Six nodes go into the three free ones of two broken ToRs each; eight into the whole ToR, which they fill."""
    free = busy(tree_of(24, tor=8), [*[8] * 5, 0, 0, 0, *[8] * 5, 0, 0, 0, *[0] * 8])
    assert nodes_of(placed(free, gang(6, cards=8))) == [5, 6, 7, 13, 14, 15]
    assert nodes_of(placed(free, gang(8, cards=8))) == list(range(16, 24))
    close = place_gang(free, gang(6, cards=8), aim="close")
    assert isinstance(close, GangPlacement)
    assert {node // 8 for node in nodes_of(close)} == {2}


def test_neighbours_share_a_tor_and_a_spine() -> None:
    """Four nodes that fit no ToR stay below one spine, although the other spine has tighter ToRs."""
    tree = tree_of(16, tor=4, spine=8)
    free = busy(tree, [8, 8, 0, 0, 8, 8, 0, 0, 8, 8, 8, 0, 8, 8, 8, 0])
    assert nodes_of(placed(free, gang(4, cards=8))) == [2, 3, 6, 7]


def test_a_unit_stays_inside_one_super_node_and_units_may_be_apart() -> None:
    """Two units of four nodes each use two super-nodes of six; one unit of eight nodes has no super-node and is split.

    Tensor, context and expert parallelism are inside a unit, data and pipeline parallelism between units.
    """
    tree = tree_of(12, super_node=6)
    free = FreeCards(tree)
    assert len(nodes_of(placed(free, gang(2, ranks=32)))) == 8
    refused = place_gang(busy(tree, [8, 8, 8, *[0] * 3, 8, 8, 8, *[0] * 3]), gang(1, ranks=32))
    assert isinstance(refused, GangRefusal)
    assert refused.is_fragmented
    assert "1 x 32 cards, each inside one super-node: 0 fit, 48 cards are free, in fragments" in refused.reason
    assert placed(free, gang(1, ranks=64)).split_units == 1


def test_super_nodes_may_be_wider_than_tors_or_inside_them() -> None:
    """The levels are ordered by what contains what."""
    assert tree_of(16, tor=4, super_node=8, spine=16).levels == (TOR, SUPER_NODE, SPINE)
    assert tree_of(16, tor=8, super_node=4).levels == (SUPER_NODE, TOR)
    for tree in (tree_of(16, tor=4, super_node=8), tree_of(16, tor=8, super_node=4)):
        free = busy(tree, [8, 0, 0, 0, *[0] * 12])
        placed(free, gang(3, ranks=32))


def test_units_of_several_sizes_are_placed_together_or_not_at_all() -> None:
    """The largest go first, so that small ones fill what is left; ranks keep their order over the site."""
    tree = tree_of(4, tor=2)
    units = (*gang(3, ranks=8).units, GangUnit(ranks={100: 4}), GangUnit(ranks={200: 2, 201: 2}))
    found = placed(FreeCards(tree), GangRequest(units=units))
    assert list(found.places)[-3:] == [100, 200, 201]
    assert found.places[100][0] == found.places[200][0]
    too_many = GangRequest(units=(*units, GangUnit(ranks={300: 1})))
    assert isinstance(place_gang(FreeCards(tree), too_many), GangRefusal)


def test_many_small_ranks_fill_whole_nodes() -> None:
    """Two thousand ranks of one card take 250 nodes, whole, and the odd ones share a node."""
    free = FreeCards(tree_of(320, tor=32))
    found = placed(free, gang(2_003))
    scores = {score.level: score for score in found.scores}
    assert (scores["node"].used, scores["node"].broken) == (251, 1)


@given(st.data())
def test_no_placement_is_better_on_a_small_site(data: st.DataObject) -> None:
    """On up to 12 nodes a placement costs, level by level, what the best of all does; a refusal means there is none."""
    num_nodes = data.draw(st.integers(1, 12))
    cards = data.draw(st.sampled_from((1, 2, 4, 8)))
    sizes = st.sampled_from((0, 2, 3, 4))
    first, second = data.draw(sizes), data.draw(st.sampled_from((0, 1, 2)))
    tree = tree_of(num_nodes, cards, tor=first, super_node=first * second)
    free = busy(tree, [data.draw(st.integers(0, cards)) for _ in range(num_nodes)])
    _compare(free, _draw_request(data, free, cards))


@pytest.mark.parametrize("seed", range(40))
def test_no_placement_is_better_with_all_levels(seed: int) -> None:
    """The same with a spine above super-nodes above ToRs, on which the widest level counts first."""
    chance = random.Random(seed)
    cards = chance.choice((1, 2, 4))
    tor, super_node = chance.choice(((2, 4), (3, 6), (2, 0), (3, 0), (2, 6), (6, 3)))
    tree = tree_of(
        12,
        cards,
        tor=tor,
        super_node=super_node,
        spine=chance.choice((0, 6, 12)) if 6 % max(tor, super_node) == 0 else 0,
    )
    for _ in range(4):
        free = busy(tree, [chance.choice((0, 0, cards, chance.randint(0, cards))) for _ in range(12)])
        ranks = chance.choice((1, 1, cards, 2 * cards if super_node else cards))
        _compare(free, _few_enough(free, chance.randint(1, max(1, free.total // ranks)), ranks))


def _draw_request(data: st.DataObject, free: FreeCards, cards: int) -> GangRequest:
    level = free.tree.unit_level
    sizes = [size for size in (1, 2, 3, 4, 8) if size <= cards]
    if level is not None and max(free.tree.domain_cards[level]) >= 2 * cards:
        sizes.append(2 * cards)
    size = data.draw(st.sampled_from(sizes))
    return _few_enough(free, data.draw(st.integers(1, max(1, free.total // size))), size)


def _few_enough(free: FreeCards, num_units: int, ranks: int) -> GangRequest:
    """Return a gang that can be placed in at most `MAX_SPREADS` ways: fewer units where there are more."""
    piece = min(ranks, free.tree.max_cards)
    most = [num // piece for num in free.counts]
    while num_units > 1 and num_spreads(most, num_units * (ranks // piece)) > MAX_SPREADS:
        num_units -= 1
    return gang(num_units, ranks=ranks)


def _compare(free: FreeCards, request: GangRequest) -> None:
    tree = free.tree
    for aim in ("packed", "close"):
        best = best_by_trying_all(free, request, aim)
        found = place_gang(free, request, aim)
        if isinstance(found, GangRefusal):
            assert best is None or (tree.unit_level is None and request.units[0].num_cards > tree.max_cards)
            continue
        check_placement(free, request, found)
        assert cost_key(found.scores, request, tree, aim) == best


def test_a_tree_ignores_unknown_nodes_and_lets_unnamed_ones_stand_alone() -> None:
    """Nodes that no ToR names are ToRs of their own; names of nodes that are not there are left out."""
    tree = SiteTree.from_groups({"a": 8, "b": 8, "c": 4}, {TOR: {"t": ["a", "b", "z"]}, SPINE: {"s": ["q"]}})
    assert tree.levels == (TOR,)
    assert tree.names == (("t", "c"),)
    assert tree.domains == ((0, 0, 1),)


def test_cards_are_taken_and_given_once() -> None:
    """A card that is taken is not free, and one that is free cannot be given back."""
    free = busy(tree_of(2, tor=2), [3, 0])
    with pytest.raises(ValueError, match="not free"):
        free.take(0, 1)
    with pytest.raises(ValueError, match="free already"):
        free.give(0, 8)
    free.give(0, 7)
    assert free.sums == [[16]]
