"""`refusals_of`: storage and network refusals of a plan at its planned places."""

from __future__ import annotations

from isthmus.control.placement.place_mixed import gradient_refusal
from isthmus.control.placement.resources.demand import Demand
from isthmus.control.placement.resources.free_resources import Resources
from isthmus.control.placement.resources.gradient_traffic import held_by
from isthmus.control.placement.stages.network_stage import NetworkStage
from isthmus.control.placement.stages.storage_stage import StorageStage
from isthmus.core.plan import Refusal


def refusals_of(demand: Demand, resources: Resources, *, network: bool) -> list[Refusal]:
    """Return the shortages of each group of pipelines, placed one after the other, then of the gradients."""
    refused: list[Refusal] = []
    left = resources
    for kind in demand.kinds:
        storage = StorageStage(kind.requirement, left)
        links = NetworkStage(kind.requirement, left, network=network)
        for number in range(1, len(kind.ranges) + 1):
            storage.stores(kind.ranges[:number])
            if number < len(kind.ranges):
                links.joins(kind.ranges[:number], kind.ranges[number].cluster)
        refused += [*storage.refusals(), *links.refusals()]
        if refused or len(demand.kinds) == 1:
            return refused
        left, _ = left.beside(kind.requirement, kind.ranges, network=network, cards=False)
    held = [one for kind in demand.kinds for one in held_by(kind.spans, kind.ranges)]
    for ends, gbps in sorted(demand.gradients.gbps(held).items()):
        link = left.links.get(ends)
        if link is None or (network and link.free_gbps < gbps):
            refused.append(gradient_refusal(left, ends, gbps))
    return refused
