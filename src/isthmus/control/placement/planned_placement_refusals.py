"""`planned_placement_refusals`: storage and network refusals of a plan at its planned places."""

from __future__ import annotations

from isthmus.control.placement.filters.network_filter import NetworkFilter
from isthmus.control.placement.filters.storage_filter import StorageFilter
from isthmus.control.placement.place_plan import gradient_refusal
from isthmus.control.placement.resources.free_resources import FreeResources
from isthmus.control.placement.resources.gradient_traffic import stage_locations
from isthmus.control.placement.resources.plan_requirement import PlanRequirement
from isthmus.core.plan import Refusal


def planned_placement_refusals(
    plan_requirement: PlanRequirement, resources: FreeResources, *, network: bool
) -> list[Refusal]:
    """Return the shortages of each group of pipelines, placed one after the other, then of the gradients."""
    refused: list[Refusal] = []
    left = resources
    for kind in plan_requirement.groups:
        storage = StorageFilter(kind.requirement, left)
        links = NetworkFilter(kind.requirement, left, network=network)
        for number in range(1, len(kind.ranges) + 1):
            storage.can_store(kind.ranges[:number])
            if number < len(kind.ranges):
                links.can_follow(kind.ranges[:number], kind.ranges[number].cluster)
        refused += [*storage.refusals(), *links.refusals()]
        if refused or len(plan_requirement.groups) == 1:
            return refused
        left, _ = left.after_placing(kind.requirement, kind.ranges, network=network, take_devices=False)
    held = [one for kind in plan_requirement.groups for one in stage_locations(kind.layer_spans, kind.ranges)]
    for ends, gbps in sorted(plan_requirement.gradients.gbps_by_pair(held).items()):
        link = left.links.get(ends)
        if link is None or (network and link.free_gbps < gbps):
            refused.append(gradient_refusal(left, ends, gbps))
    return refused
