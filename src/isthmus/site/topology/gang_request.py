"""`GangRequest`: the cards of a part that must be placed together, all or none, in units that stay together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from isthmus.core.plan import Plan

RankId: TypeAlias = int | tuple[int, int]
"""A rank; or, of one with more cards than a node has, a piece of it: (rank, number)."""


@dataclass(frozen=True, kw_only=True)
class GangUnit:
    """Ranks that exchange most, as by tensor, context and expert parallelism: they stay inside one super-node.

    `ranks` maps each rank to its number of cards, all on one node.
    """

    ranks: Mapping[RankId, int]

    @property
    def num_cards(self) -> int:
        """Cards of all ranks."""
        return sum(self.ranks.values())


@dataclass(frozen=True, kw_only=True)
class GangRequest:
    """The units of a part in one node group, in the order of their ranks: neighbours exchange activations."""

    units: tuple[GangUnit, ...]

    @property
    def num_cards(self) -> int:
        """Cards of all units."""
        return sum(unit.num_cards for unit in self.units)


def gang_requests(plan: Plan, cluster: str) -> dict[str, GangRequest]:
    """Return what the part of `plan` at `cluster` asks for, by node group.

    A stage is a unit: its tensor- and context-parallel ranks. Stages of replicas that share experts (`ep` beyond the
    stage's own chips) are one unit. Data and pipeline parallelism lie between units.
    """
    found: dict[str, list[dict[RankId, int]]] = {}
    open_units: dict[tuple[str, tuple[int, int]], tuple[dict[RankId, int], int]] = {}
    order = sorted(range(len(plan.stages)), key=lambda at: plan.ranks_of(at)[0])
    for at in order:
        stage = plan.stages[at]
        if stage.cluster != cluster:
            continue
        ranks: dict[RankId, int] = dict.fromkeys(plan.ranks_of(at), plan.chips_of(plan.ranks_of(at)[0]))
        key = (stage.node_group, stage.layers)
        unit, num_wanted = open_units.get(key, ({}, 0))
        if num_wanted and sum(unit.values()) < num_wanted:
            unit.update(ranks)
            continue
        found.setdefault(stage.node_group, []).append(ranks)
        open_units[key] = (ranks, stage.ep if stage.ep > stage.num_chips else 0)
    return {group: GangRequest(units=tuple(GangUnit(ranks=ranks) for ranks in units)) for group, units in found.items()}
