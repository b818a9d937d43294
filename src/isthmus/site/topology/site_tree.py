"""`SiteTree`: the nodes of a node group, and the domains of each level of its network that they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

SUPER_NODE, TOR, SPINE = "super-node", "ToR", "spine"
"""Levels above a node: joined by a scale-up link, by one top-of-rack switch, by one spine."""


@dataclass(frozen=True, kw_only=True)
class CardLinkGroup:
    """Cards of a node, by number, that a link of `gbps` joins."""

    cards: frozenset[int]
    gbps: float


@dataclass(frozen=True, kw_only=True)
class SiteTree:
    """Nodes with their cards, and the domain of each node at each of `levels`, narrowest first.

    A domain of a level is whole domains of the level below. `domains[level][node]` numbers the domain, `names[level]`
    names it. Cards of a node that no group of `card_links` joins reach each other through the host.
    """

    nodes: tuple[str, ...]
    # Number of cards of each node.
    cards: tuple[int, ...]
    levels: tuple[str, ...] = ()
    domains: tuple[tuple[int, ...], ...] = ()
    names: tuple[tuple[str, ...], ...] = ()
    card_links: tuple[CardLinkGroup, ...] = field(default=())

    @classmethod
    def from_groups(
        cls,
        cards: Mapping[str, int],
        levels: Mapping[str, Mapping[str, Sequence[str]]],
        card_links: Sequence[CardLinkGroup] = (),
    ) -> SiteTree:
        """Return the tree of nodes with their numbers of cards, and of `levels`: nodes by domain, narrowest first.

        Nodes that no domain of a level names are there what they are at the level below, at the narrowest level each by
        itself. Unknown nodes of domains are ignored, and so is a level without any domain.
        """
        nodes = tuple(cards)
        numbers = {node: at for at, node in enumerate(nodes)}
        kept: list[str] = []
        domains: list[tuple[int, ...]] = []
        names: list[tuple[str, ...]] = []
        for level, groups in levels.items():
            found, called = [-1] * len(nodes), list[str]()
            for name, members in groups.items():
                present = [numbers[node] for node in members if node in numbers]
                for node in present:
                    found[node] = len(called)
                if present:
                    called.append(name)
            if not called:
                continue
            alone: dict[int, int] = {}
            for node in (node for node, domain in enumerate(found) if domain < 0):
                below = domains[-1][node] if domains else node
                if below not in alone:
                    alone[below] = len(called)
                    called.append(names[-1][below] if names else nodes[node])
                found[node] = alone[below]
            kept.append(level)
            domains.append(tuple(found))
            names.append(tuple(called))
        return cls(
            nodes=nodes, cards=tuple(cards.values()), levels=tuple(kept), domains=tuple(domains), names=tuple(names),
            card_links=tuple(card_links),
        )  # fmt: skip

    @property
    def unit_level(self) -> int | None:
        """The index of the super-nodes among the levels; None where a node is the largest scale-up domain."""
        return self.levels.index(SUPER_NODE) if SUPER_NODE in self.levels else None

    @cached_property
    def members(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The nodes of each domain of each level."""
        found = []
        for domains, names in zip(self.domains, self.names, strict=True):
            rows: list[list[int]] = [[] for _ in names]
            for node, domain in enumerate(domains):
                rows[domain].append(node)
            found.append(tuple(map(tuple, rows)))
        return tuple(found)

    @cached_property
    def children(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The domains of the level below in each domain, or the nodes at the narrowest level."""
        found = []
        for level, rows in enumerate(self.members):
            if level == 0:
                found.append(rows)
            else:
                below = self.domains[level - 1]
                found.append(tuple(tuple(dict.fromkeys(below[node] for node in nodes)) for nodes in rows))
        return tuple(found)

    @cached_property
    def domain_cards(self) -> tuple[tuple[int, ...], ...]:
        """The number of cards of each domain of each level."""
        return tuple(tuple(sum(self.cards[node] for node in nodes) for nodes in rows) for rows in self.members)

    @cached_property
    def max_cards(self) -> int:
        """The largest number of cards of a node."""
        return max(self.cards, default=0)
