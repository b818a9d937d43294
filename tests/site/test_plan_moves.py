"""Rescheduling inside a site: the fewest moves, by trying all sets of parts; what may move; what moves cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_placement import GangPlacement, level_scores
from isthmus.site.topology.gang_request import GangRequest
from isthmus.site.topology.place_gang import place_gang
from isthmus.site.topology.plan_moves import MovePlan, RunningGang, plan_moves
from isthmus.site.topology.site_tree import SiteTree
from tests.site.gangs import check_placement, gang, tree_of

Running = RunningGang[str]
MAX_MOVES = 3


def run(free: FreeCards, key: str, node: int, mask: int, cost_card_s: float = 1.0) -> Running:
    """Take cards of one node for a part of one rank."""
    free.take(node, mask)
    return RunningGang(
        key=key, request=gang(1, cards=mask.bit_count()), taken={node: mask}, cost_card_s=cost_card_s
    )  # fmt: skip


def moves(
    free: FreeCards, waiting: GangRequest, running: Sequence[Running], gain_card_s: float = 1e9
) -> MovePlan[str] | None:
    found = plan_moves(free, waiting, running, gain_card_s=gain_card_s, max_moves=MAX_MOVES)
    if found is not None:
        _check(free, waiting, running, found)
    return found


def _check(free: FreeCards, waiting: GangRequest, running: Sequence[Running], found: MovePlan[str]) -> None:
    """The waiting part and all that moved have cards that nothing else has."""
    left = free.copy()
    for one in running:
        if one.key in found.moved:
            for node, mask in one.taken.items():
                left.give(node, mask)
    requests = {one.key: one.request for one in running}
    for request, placement in (
        (waiting, found.placement), *((requests[key], place) for key, place in found.moved_to.items())
    ):  # fmt: skip
        check_placement(left, request, replace(placement, scores=level_scores(left, placement.taken)))
        for node, mask in placement.taken.items():
            left.take(node, mask)
    assert set(found.moved_to) == set(found.moved)


def test_one_move_closes_two_broken_nodes() -> None:
    """Two nodes are half in use: the cheaper part moves to the other node, and the waiting one gets a whole node."""
    free = FreeCards(tree_of(2))
    running = [run(free, "dear", 0, 0b1111, 50), run(free, "cheap", 1, 0b1111, 10)]
    found = moves(free, gang(1, cards=8), running)
    assert found is not None
    assert (found.moved, found.cost_card_s, found.is_proven) == (("cheap",), 10, True)
    assert found.moved_to["cheap"].taken == {0: 0b11110000}


def test_nothing_moves_for_less_than_it_costs_nor_if_it_may_not() -> None:
    """An exempt part stays, and moves that cost as much as they gain are not made."""
    free = FreeCards(tree_of(2))
    running = [run(free, "a", 0, 0b1111, 20), run(free, "b", 1, 0b1111, 10)]
    assert moves(free, gang(1, cards=8), running, gain_card_s=10) is None
    stays = [running[0], replace(running[1], movable=False)]
    found = moves(free, gang(1, cards=8), stays)
    assert found is not None
    assert found.moved == ("a",)
    assert moves(free, gang(1, cards=8), [replace(one, movable=False) for one in running]) is None


def test_no_move_where_too_few_cards_are_free_in_sum() -> None:
    """Moves free no card, they bring free ones together."""
    free = FreeCards(tree_of(2))
    running = [run(free, "a", 0, 0b11111), run(free, "b", 1, 0b1111)]
    assert moves(free, gang(1, cards=8), running) is None


def test_a_super_node_is_cleared_where_that_takes_fewest_moves() -> None:
    """Super-nodes of four nodes: one has a part on each of two nodes, the other one part on one."""
    free = FreeCards(tree_of(8, super_node=4))
    running = [run(free, "a", 0, 0b1), run(free, "b", 1, 0b1), run(free, "c", 5, 0b1)]
    found = moves(free, gang(1, ranks=32), running)
    assert found is not None
    assert found.moved == ("c",)
    assert {node for node, _ in found.placement.places.values()} == {4, 5, 6, 7}


@pytest.mark.parametrize("seed", range(60))
def test_the_number_of_moves_is_the_least(seed: int) -> None:
    """Of up to 20 parts, no smaller set makes room: all sets of up to three are tried, and all places of what moves."""
    chance = random.Random(seed)
    cards, super_node = chance.choice((2, 4, 8)), chance.choice((0, 0, 2, 3))
    tree = tree_of(chance.randint(3, 8), cards, super_node=super_node)
    free = FreeCards(tree)
    running = fill_site(tree, free, chance)
    units = chance.randint(1, max(1, free.total // cards))
    ranks = cards * super_node if super_node and chance.random() < 0.6 else cards
    waiting = gang(units if ranks == cards else 1, ranks=ranks)
    if isinstance(place_gang(free, waiting), GangPlacement):
        return
    found, least = (
        moves(free, waiting, running),
        fewest_moves(free, waiting, running, super_node if ranks > cards else 0),
    )
    assert (found is None) == (least is None)
    if found is not None and least is not None:
        assert len(found.moved) == least[0]
        assert found.cost_card_s == pytest.approx(least[1])
        assert found.is_proven


def fill_site(tree: SiteTree, free: FreeCards, chance: random.Random) -> list[Running]:
    """Run up to 20 parts on random nodes, until about a third of the cards is free; some may not move."""
    running: list[Running] = []
    for number in range(20):
        node = chance.randrange(len(tree.nodes))
        size = chance.choice([size for size in (1, 1, 2, 4) if size <= tree.max_cards])
        bits = [bit for bit in range(tree.cards[node]) if free.masks[node] >> bit & 1]
        if len(bits) >= size and free.total > sum(tree.cards) // 3:
            mask = sum(1 << bit for bit in chance.sample(bits, size))
            part = run(free, f"p{number}", node, mask, float(chance.randint(1, 9) * size))
            running.append(replace(part, movable=chance.random() < 0.9))
    return running


def fewest_moves(
    free: FreeCards, waiting: GangRequest, running: Sequence[Running], super_node: int
) -> tuple[int, float] | None:
    """Return the least number of moves and the least cost of so many, by trying all sets of parts."""
    movable, tree = [one for one in running if one.movable], free.tree
    for num in range(1, MAX_MOVES + 1):
        costs = []
        for chosen in itertools.combinations(movable, num):
            counts = list(free.counts)
            for one in chosen:
                for node, mask in one.taken.items():
                    counts[node] += mask.bit_count()
            sizes = tuple(sorted((one.request.num_cards for one in chosen), reverse=True))
            if super_node:
                blocks = [nodes for nodes in tree.members[0] if len(nodes) == super_node]
                fits = any(
                    all(counts[node] == tree.max_cards for node in block)
                    and _packs(tuple(sorted(num for node, num in enumerate(counts) if node not in block)), sizes)
                    for block in blocks
                )
            else:
                fits = _packs(tuple(sorted(counts)), (*[tree.max_cards] * len(waiting.units), *sizes))
            if fits:
                costs.append(sum(one.cost_card_s for one in chosen))
        if costs:
            return num, min(costs)
    return None


@cache
def _packs(counts: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether pieces of `sizes` fit nodes with `counts` free cards, by trying every node for each."""
    if not sizes:
        return True
    return any(
        _packs(tuple(sorted((*counts[:at], num - sizes[0], *counts[at + 1 :]))), sizes[1:])
        for at, num in enumerate(counts)
        if num >= sizes[0]
    )
