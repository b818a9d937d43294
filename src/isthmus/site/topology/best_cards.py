"""`best_cards`: the best-connected cards of a node for the ranks that share it.

White paper on cloud-native AI, 3.2.1: some cards of a node are joined by links that are several times faster than the
bus, and a part gets those that are joined best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from isthmus.site.topology.site_tree import CardLinkGroup

MAX_CHOICES = 5_000
"""Above this number of choices of cards for one rank, cards are added one by one, each the best for those before."""

_Value = tuple[float, float, float]
"""Sums over the ranks of the slowest pair and of all pairs, and the sum over the pairs that stay free, in Gbit/s."""


def best_cards(mask: int, sizes: Sequence[int], links: tuple[CardLinkGroup, ...]) -> list[int]:
    """Return the cards for each rank of `sizes` out of the free ones of `mask`, a bit for each card.

    The sum over ranks of the slowest link inside each is largest, then that of all links inside, then that of the links
    between the cards that stay free. Without `links` ranks get their cards in order. Raises `ValueError` if too few
    cards are free.
    """
    if sum(sizes) > mask.bit_count():
        raise ValueError(f"{sum(sizes)} cards wanted, {mask.bit_count()} are free")
    if not links:
        cards = iter(_bits(mask))
        return [sum(1 << next(cards) for _ in range(size)) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda at: -sizes[at])
    found = [0] * len(sizes)
    if all(math.comb(mask.bit_count(), size) <= MAX_CHOICES // max(1, len(sizes)) for size in sizes):
        for at, chosen in zip(order, _jointly(mask, tuple(sizes[at] for at in order), links)[1], strict=True):
            found[at] = chosen
        return found
    for at in order:
        found[at] = _one_by_one(mask, sizes[at], links)
        mask &= ~found[at]
    return found


@lru_cache(maxsize=1 << 14)
def _jointly(mask: int, sizes: tuple[int, ...], links: tuple[CardLinkGroup, ...]) -> tuple[_Value, tuple[int, ...]]:
    """Return the best value of placing `sizes`, largest first, in `mask`, and the cards of each."""
    if not sizes:
        return (0.0, 0.0, _pairs(mask, links)[1]), ()
    best: tuple[_Value, tuple[int, ...]] | None = None
    cards = _bits(mask)
    # Ranks of one size that take all that is free may be told apart by the lowest card.
    fixed = cards[:1] if len(set(sizes)) == 1 and sum(sizes) == len(cards) else []
    for more in itertools.combinations(cards[len(fixed) :], sizes[0] - len(fixed)):
        chosen = sum(1 << card for card in (*fixed, *more))
        (slowest, total, rest), others = _jointly(mask & ~chosen, sizes[1:], links)
        own = _pairs(chosen, links)
        value = (slowest + own[0], total + own[1], rest)
        if best is None or value > best[0]:
            best = value, (chosen, *others)
    if best is None:
        raise ValueError("too few cards are free")
    return best


def _one_by_one(mask: int, size: int, links: tuple[CardLinkGroup, ...]) -> int:
    """Return `size` cards: grown card by card from the best pair of each group of links, the best of these."""
    cards = _bits(mask)
    if size == 1:
        return min((1 << card for card in cards), key=lambda one: -_pairs(mask & ~one, links)[1])
    starts = [_best_pair([card for card in cards if card in link.cards] or cards, links) for link in links]
    return max(
        (_grow(start, size, cards, links) for start in dict.fromkeys(starts)), key=lambda one: _pairs(one, links)
    )


def _best_pair(cards: Sequence[int], links: tuple[CardLinkGroup, ...]) -> int:
    if len(cards) < 2:
        return 1 << cards[0]
    return max((1 << a | 1 << b for a, b in itertools.combinations(cards, 2)), key=lambda pair: _pairs(pair, links))


def _grow(chosen: int, size: int, cards: Sequence[int], links: tuple[CardLinkGroup, ...]) -> int:
    """Add to `chosen` the best card of `cards` until there are `size`."""
    while chosen.bit_count() < size:
        others = [1 << card for card in cards if not chosen >> card & 1]
        chosen |= max(others, key=lambda one: _pairs(chosen | one, links))
    return chosen


@lru_cache(maxsize=1 << 16)
def _pairs(mask: int, links: tuple[CardLinkGroup, ...]) -> tuple[float, float]:
    """Return the rate of the slowest pair of cards and of all pairs together; one card alone counts 0."""
    rates = [_rate(a, b, links) for a, b in itertools.combinations(_bits(mask), 2)]
    return min(rates, default=0.0), sum(rates)


@lru_cache(maxsize=1 << 14)
def _rate(a: int, b: int, links: tuple[CardLinkGroup, ...]) -> float:
    return max((link.gbps for link in links if a in link.cards and b in link.cards), default=0.0)


def _bits(mask: int) -> list[int]:
    return [card for card in range(mask.bit_length()) if mask >> card & 1]
