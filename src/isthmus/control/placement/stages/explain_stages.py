"""`explain`: a description of a placement: devices, storage and links of its ranges."""

from __future__ import annotations

import itertools

from isthmus.control.placement.resources.free_resources import Resources
from isthmus.control.placement.resources.requirement import Requirement
from isthmus.control.placement.stages.compute_stage import Ranges
from isthmus.core.units import format_bytes


def explain(ranges: Ranges, requirement: Requirement, resources: Resources) -> str:
    """Return the places of the stages with their devices, storage and link needs, as one line of text."""
    pieces = [_place(first, last, where, requirement) for first, last, where in ranges]
    for where in dict.fromkeys(one.cluster for one in ranges):
        free = resources.sites[where].free_storage_bytes
        needed = requirement.storage_bytes([(a.first, a.last) for a in ranges if a.cluster == where])
        if needed and free is not None:
            pieces.append(f"{where} stores {format_bytes(needed)} of {format_bytes(free)} free")
    for a, b in itertools.pairwise(ranges):
        need, link = requirement.boundaries[a.last - 1], resources.links[a.cluster, b.cluster]
        pieces.append(
            f"{a.cluster} to {b.cluster} needs {need.gbps:.3g} of {link.free_gbps:.3g} Gbit/s left, "
            f"its delay is {1e3 * link.delay_s:.3g} ms, the schedule tolerates {1e3 * need.delay_s:.3g}"
        )
    return "; ".join(pieces)


def _place(first: int, last: int, where: str, requirement: Requirement) -> str:
    devices: dict[str, int] = {}
    for stage in requirement.stages[first:last]:
        devices[stage.chip] = devices.get(stage.chip, 0) + stage.cards * requirement.pipelines
    stages = f"stage {first}" if last == first + 1 else f"stages {first} to {last - 1}"
    return f"{stages} at {where} on " + " and ".join(f"{count} {chip}" for chip, count in devices.items())
