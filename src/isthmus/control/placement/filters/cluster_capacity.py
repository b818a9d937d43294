"""`ClusterCapacity`: how many stages of a requirement fit into one cluster, computed from node counts.

Stage sizes on one kind of chip divide one another (`PipelineRequirement` checks this), so the choice of node does not
matter: a node with `n` free devices has `n // s` slots of size `s`, and a larger stage on it uses a whole
number of these slots. Stages therefore fit if and only if, for every size, they and all larger ones, counted
in slots of that size, do not exceed the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from isthmus.control.placement.resources.free_resources import ClusterResources, FreeNodeGroup
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement


class ClusterCapacity:
    """Capacity of `site` for `requirement`. Counts are stages by size, each for all pipelines.

    `slots[i]` is the number of slots of size `i`, `max_stages[i]` the stages that they hold for all pipelines;
    `prices_per_hour[i]` is the price per hour of such a stage (the mean over different node groups).
    `reads_data`: the first and the last stage may be here.
    """

    def __init__(self, requirement: PipelineRequirement, site: ClusterResources, *, reads_data: bool = True) -> None:
        self.requirement, self.site, self.reads_data = requirement, site, reads_data
        self.name, d = site.name, requirement.num_pipelines
        self._groups = {chip: site.groups_with_chip(chip) for chip in requirement.chips}
        sizes = requirement.sizes
        self.slots = [sum(g.slots(cards) for g in self._groups[chip]) for chip, cards in sizes]
        self.max_stages = [places // d for places in self.slots]
        self.prices_per_hour = [d * cards * _mean_price(self._groups[chip]) for chip, cards in sizes]

    @cached_property
    def max_range_ends(self) -> list[int]:
        """For every first stage, the end of the longest range that fits into the empty cluster."""
        count, found, last = self.requirement.num_stages, [], 0
        for first in range(count):
            last = max(first, last)
            while last < count and self.fits(self.requirement.count_by_size(first, last + 1)):
                last += 1
            found.append(last)
        return found

    def max_range_end_beside(self, first: int, used: Sequence[int]) -> int:
        """Return the end of the longest range from `first` that fits beside `used` (stages by size)."""
        last, most = first, self.max_range_ends[first]
        while last < most:
            more = self.requirement.count_by_size(first, last + 1)
            if not self.fits([a + b for a, b in zip(used, more, strict=True)]):
                break
            last += 1
        return last

    def max_fitting(self, remaining: Sequence[int], used: Sequence[int] | None) -> int:
        """Return an upper bound on the stages of `remaining` that fit beside `used`."""
        if used is None:
            return sum(min(a, b) for a, b in zip(self.max_stages, remaining, strict=True))
        free = zip(self.max_stages, used, remaining, strict=True)
        return sum(min(max(0, most - taken), wanted) for most, taken, wanted in free)

    def fits(self, counts: Sequence[int]) -> bool:
        """Return whether stages fit into the empty cluster."""
        if len(self.max_stages) == 1:
            return counts[0] <= self.max_stages[0]
        return not any(self._missing_slots(counts))

    def price_per_hour(self, counts: Sequence[int]) -> float:
        """Return the price per hour of stages."""
        return sum(one * price for one, price in zip(counts, self.prices_per_hour, strict=True))

    def missing_nodes(self, counts: Sequence[int]) -> dict[tuple[str, int], int]:
        """Return the nodes missing for stages, by (kind of chip, free devices per node)."""
        found: dict[tuple[str, int], int] = {}
        for chip in self.requirement.chips:
            most, node = 0, self._devices_per_node(chip)
            for (kind, cards), places in zip(self.requirement.sizes, self._missing_slots(counts), strict=True):
                if kind == chip and places:
                    most = max(most, -(-places // max(1, node // cards)))
            if most:
                found[chip, node] = most
        return found

    def _missing_slots(self, counts: Sequence[int]) -> list[int]:
        """Return the missing slots by size."""
        sizes, found = self.requirement.sizes, []
        for i, (chip, cards) in enumerate(sizes):
            larger = (counts[j] * (sizes[j][1] // cards) for j in range(i + 1) if sizes[j][0] == chip)
            found.append(max(0, sum(larger) * self.requirement.num_pipelines - self.slots[i]))
        return found

    def _devices_per_node(self, chip: str) -> int:
        here = [group.devices_per_node for group in self._groups[chip]]
        wanted = [s.devices_per_node for s in self.requirement.stages if s.chip == chip]
        return max(here or wanted)


def _mean_price(groups: Sequence[FreeNodeGroup]) -> float:
    cards = [sum(free * count for free, count in group.nodes.items()) for group in groups]
    total = sum(group.price_per_device_hour * num for group, num in zip(groups, cards, strict=True))
    return total / sum(cards) if sum(cards) else 0.0
