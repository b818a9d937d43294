"""`explain_placement`: a description of a placement: devices, storage and links of its ranges."""

from __future__ import annotations

import itertools

from isthmus.control.placement.filters.compute_search import StageRanges
from isthmus.control.placement.resources.free_resources import FreeResources
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement
from isthmus.core.units import format_bytes


def explain_placement(ranges: StageRanges, requirement: PipelineRequirement, resources: FreeResources) -> str:
    """Return the places of the stages with their devices, storage and link needs, as one line of text."""
    pieces = [_describe_range(first, last, where, requirement) for first, last, where in ranges]
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


def _describe_range(first: int, last: int, where: str, requirement: PipelineRequirement) -> str:
    devices: dict[str, int] = {}
    for stage in requirement.stages[first:last]:
        devices[stage.chip] = devices.get(stage.chip, 0) + stage.num_devices * requirement.num_pipelines
    stages = f"stage {first}" if last == first + 1 else f"stages {first} to {last - 1}"
    return f"{stages} at {where} on " + " and ".join(f"{count} {chip}" for chip, count in devices.items())
