"""`FreeCards`: which cards of a site's nodes are free, with the sums that placement asks for."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from isthmus.site.topology.site_tree import SiteTree

Signature = tuple[object, ...]
"""What placement knows of a domain: equal ones have equal curves."""


class FreeCards:
    """The free cards of `tree`: all, or those of `masks`, a bit for each card of a node."""

    def __init__(self, tree: SiteTree, masks: Iterable[int] | None = None) -> None:
        self.tree = tree
        self.masks = [(1 << num) - 1 for num in tree.cards] if masks is None else list(masks)
        self.counts = [mask.bit_count() for mask in self.masks]
        self.sums = [[sum(self.counts[node] for node in nodes) for nodes in rows] for rows in tree.members]
        self.total = sum(self.counts)
        self._signatures: list[dict[int, Signature]] = [{} for _ in tree.levels]
        # Of `place_gang`: curves by what they are of.
        self.memory: dict[Hashable, dict[Any, Any]] = {}

    def copy(self) -> FreeCards:
        """Return an independent copy."""
        made = object.__new__(FreeCards)
        made.tree, made.masks, made.counts, made.total = self.tree, list(self.masks), list(self.counts), self.total
        made.sums = [list(row) for row in self.sums]
        made._signatures, made.memory = [dict(row) for row in self._signatures], self.memory
        return made

    def take(self, node: int, mask: int) -> None:
        """Mark the cards of `mask` as taken; raise `ValueError` if one is not free."""
        if mask & ~self.masks[node]:
            raise ValueError(f"cards of node {self.tree.nodes[node]} are not free")
        self._change(node, self.masks[node] & ~mask)

    def give(self, node: int, mask: int) -> None:
        """Mark the cards of `mask` as free; raise `ValueError` if one already is."""
        if mask & self.masks[node] or mask >> self.tree.cards[node]:
            raise ValueError(f"cards of node {self.tree.nodes[node]} are free already, or do not exist")
        self._change(node, self.masks[node] | mask)

    def signature(self, level: int, domain: int) -> Signature:
        """Return the domain's numbers of nodes by free cards, or its children's signatures, and its size."""
        known = self._signatures[level].get(domain)
        if known is None:
            children = self.tree.children[level][domain]
            if level == 0:
                inner: Iterable[object] = sorted(
                    (self.counts[node], self.tree.cards[node]) for node in children if self.counts[node]
                )
            else:
                inner = sorted(
                    (self.signature(level - 1, one) for one in children if self.sums[level - 1][one]), key=repr
                )
            known = self._signatures[level][domain] = (self.tree.domain_cards[level][domain], *inner)
        return known

    def _change(self, node: int, mask: int) -> None:
        more = mask.bit_count() - self.counts[node]
        self.masks[node] = mask
        self.counts[node] += more
        self.total += more
        for level, domains in enumerate(self.tree.domains):
            self.sums[level][domains[node]] += more
            self._signatures[level].pop(domains[node], None)
