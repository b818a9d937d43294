"""`Room`: how many stages of a requirement fit into one cluster, computed from node counts.

Stage sizes on one kind of chip divide one another (`Requirement` checks this), so the choice of node does not
matter: a node with `n` free devices has `n // s` slots of size `s`, and a larger stage on it uses a whole
number of these slots. Stages therefore fit if and only if, for every size, they and all larger ones, counted
in slots of that size, do not exceed the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from isthmus.control.placement.resources.free_resources import FreeGroup, Site
from isthmus.control.placement.resources.requirement import Requirement


class Room:
    """Capacity of `site` for `requirement`. Counts are stages by size, each for all pipelines.

    `places[i]` is the number of slots of size `i`, `most[i]` the stages that they hold for all pipelines;
    `prices[i]` is the price per hour of such a stage (the mean over different node groups).
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
        """For every first stage, the end of the longest range that fits into the empty cluster."""
        count, found, last = self.requirement.num_stages, [], 0
        for first in range(count):
            last = max(first, last)
            while last < count and self.holds(self.requirement.counts(first, last + 1)):
                last += 1
            found.append(last)
        return found

    def reach_beside(self, first: int, used: Sequence[int]) -> int:
        """Return the end of the longest range from `first` that fits beside `used` (stages by size)."""
        last, most = first, self.reach[first]
        while last < most:
            more = self.requirement.counts(first, last + 1)
            if not self.holds([a + b for a, b in zip(used, more, strict=True)]):
                break
            last += 1
        return last

    def at_most(self, remaining: Sequence[int], used: Sequence[int] | None) -> int:
        """Return an upper bound on the stages of `remaining` that fit beside `used`."""
        if used is None:
            return sum(min(a, b) for a, b in zip(self.most, remaining, strict=True))
        free = zip(self.most, used, remaining, strict=True)
        return sum(min(max(0, most - taken), wanted) for most, taken, wanted in free)

    def holds(self, counts: Sequence[int]) -> bool:
        """Return whether stages fit into the empty cluster."""
        if len(self.most) == 1:
            return counts[0] <= self.most[0]
        return not any(self._lacking(counts))

    def price(self, counts: Sequence[int]) -> float:
        """Return the price per hour of stages."""
        return sum(one * price for one, price in zip(counts, self.prices, strict=True))

    def lacking_nodes(self, counts: Sequence[int]) -> dict[tuple[str, int], int]:
        """Return the nodes missing for stages, by (kind of chip, free devices per node)."""
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
        """Return the missing slots by size."""
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
