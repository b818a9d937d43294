"""`explain_part`: where a plan's part goes at a site, what that costs at each level, and what else there was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from isthmus.core.plan import Plan
from isthmus.core.pool import Cluster
from isthmus.site.topology.free_cards import FreeCards
from isthmus.site.topology.gang_cost import Aim
from isthmus.site.topology.gang_placement import GangPlacement, GangRefusal, domain_names
from isthmus.site.topology.gang_request import gang_requests
from isthmus.site.topology.place_gang import place_gang
from isthmus.site.topology.tree_of_group import node_names, tree_of_group

AIMS: tuple[Aim, ...] = ("packed", "close", "spread")


@dataclass(frozen=True, kw_only=True)
class SitePlacement:
    """The placement of a part in one node group: the chosen one first, then others that differ; or the refusal."""

    cluster: str
    node_group: str
    free: FreeCards
    found: tuple[GangPlacement, ...]
    refusal: GangRefusal | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form: nodes and cards by rank, scores by level, alternatives."""
        record: dict[str, Any] = {"cluster": self.cluster, "node_group": self.node_group}
        if self.refusal is not None:
            return {**record, "placed": False, "reason": self.refusal.reason, "fragmented": self.refusal.is_fragmented}
        first, *others = self.found
        return {
            **record,
            "placed": True,
            **self._placement(first),
            "split_units": first.split_units,
            "alternatives": [self._placement(one) for one in others],
        }

    def nodes_by_rank(self, placement: GangPlacement) -> list[tuple[int, str, list[int]]]:
        """Return rank, node and cards of each rank, in the order of the ranks."""
        rows = (
            (rank if isinstance(rank, int) else rank[0], self.free.tree.nodes[node], mask)
            for rank, (node, mask) in placement.places.items()
        )
        return sorted(
            (rank, node, [at for at in range(mask.bit_length()) if mask >> at & 1]) for rank, node, mask in rows
        )

    def _placement(self, placement: GangPlacement) -> dict[str, Any]:
        return {
            "aim": placement.aim,
            "ranks": [
                {"rank": rank, "node": node, "cards": cards} for rank, node, cards in self.nodes_by_rank(placement)
            ],
            "domains": domain_names(self.free.tree, placement.taken),
            "levels": [
                {"level": one.level, "used": one.used, "broken": one.broken, "left_cards": one.left_cards}
                for one in placement.scores
            ],
        }


def explain_part(cluster: Cluster, plan: Plan, taken: Iterable[str] = ()) -> list[SitePlacement]:
    """Return the placements of the part of `plan` at `cluster`, by node group; `taken` devices are in use.

    Devices are named `GROUP/NODE/CARD`, as agents name them.
    """
    used = set(taken)
    found = []
    for name, request in gang_requests(plan, cluster.name).items():
        group = cluster.group(name)
        nodes = node_names(cluster, name)
        free = FreeCards(tree_of_group(group, dict.fromkeys(nodes, group.chips_per_node)))
        for at, node in enumerate(nodes):
            mask = sum(1 << card for card in range(group.chips_per_node) if f"{name}/{node}/{card}" in used)
            if mask:
                free.take(at, mask)
        answers = [place_gang(free, request, aim) for aim in AIMS]
        placed = [one for one in answers if isinstance(one, GangPlacement)]
        different = [one for at, one in enumerate(placed) if all(one.scores != two.scores for two in placed[:at])]
        refusal = next((one for one in answers if isinstance(one, GangRefusal)), None)
        found.append(
            SitePlacement(
                cluster=cluster.name, node_group=name, free=free, found=tuple(different),
                refusal=None if different else refusal,
            )
        )  # fmt: skip
    return found
