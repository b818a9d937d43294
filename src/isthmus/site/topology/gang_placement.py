"""`GangPlacement`: where each rank of a part goes, and what that costs at each level of the site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_cost import NODE, Aim
from isthmus.site.topology.gang_request import RankId
from isthmus.site.topology.site_tree import SiteTree


@dataclass(frozen=True, kw_only=True)
class LevelScore:
    """What a placement costs at one level: domains that it uses, whole free ones that it breaks, cards left free in
    those that it uses.
    """

    level: str
    used: int
    broken: int
    left_cards: int


@dataclass(frozen=True, kw_only=True)
class GangPlacement:
    """The node and the cards, a bit for each, of every rank; `split_units` are units that no super-node can hold."""

    places: Mapping[RankId, tuple[int, int]]
    aim: Aim
    scores: tuple[LevelScore, ...]
    split_units: int = 0

    @property
    def taken(self) -> dict[int, int]:
        """The cards of each node, a bit for each."""
        found: dict[int, int] = {}
        for node, mask in self.places.values():
            found[node] = found.get(node, 0) | mask
        return found


@dataclass(frozen=True, kw_only=True)
class GangRefusal:
    """Why a part has no place: only `fitting` of its `wanted` units of `unit_cards` cards fit, so none starts."""

    unit_cards: int
    wanted: int
    fitting: int
    free_cards: int
    inside: str

    @property
    def is_fragmented(self) -> bool:
        """Whether enough cards are free, only not together."""
        return self.free_cards >= self.unit_cards * self.wanted

    @property
    def reason(self) -> str:
        """The reason in words."""
        units = f"{self.wanted} x {self.unit_cards} cards, each inside one {self.inside}"
        free = f"{self.free_cards} cards are free" + (", in fragments" if self.is_fragmented else "")
        return f"{units}: {self.fitting} fit, {free}"


def level_scores(free: FreeCards, taken: Mapping[int, int]) -> tuple[LevelScore, ...]:
    """Return the score of taking `taken`, cards by node, from `free`, from the node to the widest level."""
    tree = free.tree
    used = {node: mask.bit_count() for node, mask in taken.items()}
    rows = [_score(NODE, used, free.counts, tree.cards)]
    for level, name in enumerate(tree.levels):
        inside: dict[int, int] = {}
        for node, num in used.items():
            domain = tree.domains[level][node]
            inside[domain] = inside.get(domain, 0) + num
        rows.append(_score(name, inside, free.sums[level], tree.domain_cards[level]))
    return tuple(rows)


def domain_names(tree: SiteTree, nodes: Iterable[int]) -> dict[str, list[str]]:
    """Return the names of the domains that `nodes` are in, by level."""
    nodes = tuple(nodes)
    return {
        name: list(dict.fromkeys(tree.names[level][tree.domains[level][node]] for node in nodes))
        for level, name in enumerate(tree.levels)
    }


def _score(level: str, used: Mapping[int, int], free: list[int], size: tuple[int, ...]) -> LevelScore:
    return LevelScore(
        level=level,
        used=len(used),
        broken=sum(free[one] == size[one] and num < size[one] for one, num in used.items()),
        left_cards=sum(free[one] - num for one, num in used.items()),
    )
