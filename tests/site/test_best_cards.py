"""Cards of a node: the best joined ones, by trying all."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.site.topology.best_cards import best_cards
from isthmus.site.topology.site_tree import CardLinkGroup
from tests.site.gangs import PAIRS

HALVES = (
    CardLinkGroup(cards=frozenset(range(4)), gbps=200.0),
    CardLinkGroup(cards=frozenset(range(4, 8)), gbps=200.0),
)


def test_two_ranks_get_the_two_linked_pairs_that_are_free() -> None:
    """Cards 1 and 2 are neighbours by number, but only 2 and 3 are joined."""
    assert best_cards(0b11001110, [2, 2], PAIRS) == [0b1100, 0b11000000]


def test_a_rank_of_one_card_breaks_no_pair() -> None:
    """It gets the card whose partner is in use."""
    assert best_cards(0b11111101, [1], PAIRS) == [0b1]


def test_the_slowest_link_of_a_rank_counts_first() -> None:
    """Four cards of one half beat two pairs of both halves, although the pairs are faster."""
    assert best_cards(0b11111111, [4], (*HALVES, *PAIRS)) == [0b1111]
    assert best_cards(0b11110111, [4], (*HALVES, *PAIRS)) == [0b11110000]


def test_without_links_ranks_get_cards_in_order_and_too_few_are_an_error() -> None:
    """Nothing is known of the node, so neighbours by number stay together."""
    assert best_cards(0b1101, [2, 1], ()) == [0b101, 0b1000]
    with pytest.raises(ValueError, match="3 cards wanted, 2 are free"):
        best_cards(0b11, [3], PAIRS)


def test_a_node_of_many_cards_is_answered_at_once() -> None:
    """Sixteen of 64 cards can be chosen in 10 to the 14 ways; a linked group is found without them."""
    links = tuple(CardLinkGroup(cards=frozenset(range(at, at + 16)), gbps=400.0) for at in range(0, 64, 16))
    assert best_cards((1 << 64) - 1 & ~(1 << 5), [16], links) in [[((1 << 16) - 1) << at] for at in (16, 32, 48)]


_LINKS = st.lists(
    st.builds(
        CardLinkGroup, cards=st.frozensets(st.integers(0, 5), min_size=2), gbps=st.sampled_from((50.0, 100.0, 400.0))
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@given(st.integers(1, 63), st.lists(st.integers(1, 3), min_size=1, max_size=3), _LINKS)
def test_no_choice_of_cards_is_better(mask: int, sizes: list[int], links: list[CardLinkGroup]) -> None:
    """The sums of the slowest links, of all links and of those that stay free are those of the best of all choices."""
    if sum(sizes) > mask.bit_count():
        return
    groups = tuple(links)
    chosen = best_cards(mask, sizes, groups)
    assert [one.bit_count() for one in chosen] == sizes
    assert sum(chosen) & ~mask == 0
    assert _worth(mask, chosen, groups) == max(_worth(mask, one, groups) for one in _choices(mask, sizes))


def _choices(mask: int, sizes: list[int]) -> list[list[int]]:
    if not sizes:
        return [[]]
    cards = [card for card in range(8) if mask >> card & 1]
    chosen = (sum(1 << card for card in some) for some in itertools.combinations(cards, sizes[0]))
    return [[one, *rest] for one in chosen for rest in _choices(mask & ~one, sizes[1:])]


def _worth(mask: int, chosen: list[int], links: tuple[CardLinkGroup, ...]) -> tuple[float, float, float]:
    rates = [[_rate(pair, links) for pair in itertools.combinations(_cards(one), 2)] for one in chosen]
    rest = sum(_rate(pair, links) for pair in itertools.combinations(_cards(mask & ~sum(chosen)), 2))
    return sum(min(one, default=0.0) for one in rates), sum(map(sum, rates)), rest


def _rate(pair: tuple[int, int], links: tuple[CardLinkGroup, ...]) -> float:
    return max((link.gbps for link in links if set(pair) <= link.cards), default=0.0)


def _cards(mask: int) -> list[int]:
    return [card for card in range(8) if mask >> card & 1]
