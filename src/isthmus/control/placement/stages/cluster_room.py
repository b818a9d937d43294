"""`Room`: how many stages of a requirement one cluster holds, from numbers of nodes alone.

Sizes of stages on one kind of chip divide one another (`Requirement` sees to it). Then it does not matter
which node a stage goes to: a node with `n` free cards holds `n // s` stages of size `s`, and each larger one
that was put there first costs a whole number of these places. So stages fit if, for every size, they and all
larger ones, counted in places of that size, are no more than the places. That is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from isthmus.control.placement.resources.free_resources import FreeGroup, Site
from isthmus.control.placement.resources.requirement import Requirement


class Room:
    """What `site` holds of `requirement`. Counts are numbers of stages by size, each of all its pipelines.

    `places[i]` stages of size `i` of one pipeline have a place, `most[i]` of all pipelines; `prices[i]` is
    what one of all pipelines costs an hour (where node groups differ, at the mean price of their cards).
    `reads_data`: the first and the last stage may be here.
    """

    def __init__(self, requirement: Requirement, site: Site, *, reads_data: bool = True) -> None:
        self.requirement, self.site, self.reads_data = requirement, site, reads_data
        self.name, d = site.name, requirement.pipelines
        self._groups = {chip: site.of_chip(chip) for chip in requirement.chips}
        sizes = requirement.sizes
        self.places = [sum(g.slots(cards) for g in self._groups[chip]) for chip, cards in sizes]
        self.most = [places // d for places in self.places]
        self.prices = [d * cards * _mean_price(self._groups[chip]) for chip, cards in sizes]

    @cached_property
    def reach(self) -> list[int]:
        """For every stage, the end of the widest range that starts there and fits here while it is empty."""
        count, found, last = self.requirement.num_stages, [], 0
        for first in range(count):
            last = max(first, last)
            while last < count and self.holds(self.requirement.counts(first, last + 1)):
                last += 1
            found.append(last)
        return found

    def reach_beside(self, first: int, used: Sequence[int]) -> int:
        """Return the end of the widest range from `first` on that fits beside `used` stages by size."""
        last, most = first, self.reach[first]
        while last < most:
            more = self.requirement.counts(first, last + 1)
            if not self.holds([a + b for a, b in zip(used, more, strict=True)]):
                break
            last += 1
        return last

    def at_most(self, remaining: Sequence[int], used: Sequence[int] | None) -> int:
        """Return a bound on the stages of `remaining` that fit here beside those `used`."""
        if used is None:
            return sum(min(a, b) for a, b in zip(self.most, remaining, strict=True))
        free = zip(self.most, used, remaining, strict=True)
        return sum(min(max(0, most - taken), wanted) for most, taken, wanted in free)

    def holds(self, counts: Sequence[int]) -> bool:
        """Tell whether stages fit here while it is empty."""
        if len(self.most) == 1:
            return counts[0] <= self.most[0]
        return not any(self._lacking(counts))

    def price(self, counts: Sequence[int]) -> float:
        """Return what stages cost an hour."""
        return sum(one * price for one, price in zip(counts, self.prices, strict=True))

    def lacking_nodes(self, counts: Sequence[int]) -> dict[tuple[str, int], int]:
        """Return how many more nodes stages need here, by kind of chip and free cards per node."""
        found: dict[tuple[str, int], int] = {}
        for chip in self.requirement.chips:
            most, node = 0, self._cards_per_node(chip)
            for (kind, cards), places in zip(self.requirement.sizes, self._lacking(counts), strict=True):
                if kind == chip and places:
                    most = max(most, -(-places // max(1, node // cards)))
            if most:
                found[chip, node] = most
        return found

    def _lacking(self, counts: Sequence[int]) -> list[int]:
        """Return by size the places that are lacking."""
        sizes, found = self.requirement.sizes, []
        for i, (chip, cards) in enumerate(sizes):
            larger = (counts[j] * (sizes[j][1] // cards) for j in range(i + 1) if sizes[j][0] == chip)
            found.append(max(0, sum(larger) * self.requirement.pipelines - self.places[i]))
        return found

    def _cards_per_node(self, chip: str) -> int:
        here = [group.cards_per_node for group in self._groups[chip]]
        wanted = [s.cards_per_node for s in self.requirement.stages if s.chip == chip]
        return max(here or wanted)


def _mean_price(groups: Sequence[FreeGroup]) -> float:
    cards = [sum(free * count for free, count in group.nodes.items()) for group in groups]
    total = sum(group.price_per_card_hour * num for group, num in zip(groups, cards, strict=True))
    return total / sum(cards) if sum(cards) else 0.0
