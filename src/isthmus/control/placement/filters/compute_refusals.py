"""Refusals of the compute search: missing nodes of each cluster, and of all clusters together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.control.placement.filters.cluster_capacity import ClusterCapacity
from isthmus.control.placement.resources.free_resources import chip_model
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement
from isthmus.core.job import PlacementConstraints
from isthmus.core.plan import Refusal


def constraint_refusal(chips: Iterable[str], num_devices: int, constraints: PlacementConstraints) -> Refusal | None:
    """Return the refusal if the constraints exclude these chips everywhere, otherwise None."""
    models = sorted({chip_model(chip) for chip in chips})
    reason = ""
    if len(models) > 1 and not constraints.mixed_chips:
        reason = f"the pipelines are for {', '.join(models)}, but placement.mixed_chips is false"
    others = [model for model in models if constraints.chips and model not in constraints.chips]
    if others:
        reason = f"the pipelines are for {', '.join(others)}, which placement.chips does not name"
    if constraints.max_chips and num_devices > constraints.max_chips:
        reason = f"{num_devices} chips exceed placement.max_chips, {constraints.max_chips}"
    return Refusal(clusters=(), stage="compute", reason=f"compute: {reason}") if reason else None


def compute_refusals(
    requirement: PipelineRequirement,
    capacities: Sequence[ClusterCapacity],
    owner_groups: Sequence[Sequence[ClusterCapacity]],
    *,
    exhaustive: bool,
) -> list[Refusal]:
    """Return a refusal for all clusters together, and one for each that cannot hold the complete job.

    `exhaustive`: the search was exhaustive.
    """
    if not capacities:
        return [Refusal(clusters=(), stage="compute", reason="compute: the job's placement admits no cluster")]
    every = requirement.count_by_size(0, requirement.num_stages)
    found = []
    for room in sorted(capacities, key=lambda one: one.name):
        lacking = room.missing_nodes(every)
        if lacking:
            found.append(
                Refusal(
                    clusters=(room.name,),
                    stage="compute",
                    owner=room.site.owner,
                    lacking_nodes=sum(lacking.values()),
                    reason=f"compute: {room.name} ({room.site.owner}) lacks {_describe_nodes(lacking)}",
                )
            )
    return [*_combined_refusals(requirement, capacities, owner_groups, exhaustive=exhaustive), *found]


def _combined_refusals(
    requirement: PipelineRequirement,
    capacities: Sequence[ClusterCapacity],
    owner_groups: Sequence[Sequence[ClusterCapacity]],
    *,
    exhaustive: bool,
) -> list[Refusal]:
    """Return why all clusters together do not suffice or must not be combined."""
    names = tuple(sorted(room.name for room in capacities))
    lacking = _combined_missing_nodes(requirement, capacities)
    if lacking:
        reason = f"compute: all clusters together lack {_describe_nodes(lacking)}"
        total = sum(lacking.values())
        return [Refusal(clusters=names, stage="compute", lacking_nodes=total, reason=reason)]
    if len(owner_groups) > 1 and all(_combined_missing_nodes(requirement, group) for group in owner_groups):
        reason = "compute: no single owner has enough nodes; set placement.several_owners: true to combine owners"
        return [Refusal(clusters=names, stage="compute", reason=reason)]
    readers = [room for room in capacities if room.reads_data and any(room.max_stages)]
    if not readers:
        reason = "compute: no cluster with free chips may read the training data (placement.data_owners, data_regions)"
        return [Refusal(clusters=names, stage="compute", reason=reason)]
    reason = "compute: no cluster holds all stages, and "
    reason += (
        "no split over several clusters is admitted"
        if exhaustive
        else "the search for a split over several clusters ran out of its budget"
    )
    return [Refusal(clusters=names, stage="compute", reason=reason)]


def _combined_missing_nodes(
    requirement: PipelineRequirement, capacities: Sequence[ClusterCapacity]
) -> dict[tuple[str, int], int]:
    """Return the nodes still missing when every cluster takes as many stages as it holds."""
    wanted = requirement.count_by_size(0, requirement.num_stages)
    found: dict[tuple[str, int], int] = {}
    for i, (chip, cards) in enumerate(requirement.sizes):
        stages = wanted[i] - sum(room.max_stages[i] for room in capacities)
        if stages > 0:
            node = max(s.devices_per_node for s in requirement.stages if s.chip == chip)
            nodes = -(-stages * requirement.num_pipelines // max(1, node // cards))
            found[chip, node] = max(nodes, found.get((chip, node), 0))
    return found


def _describe_nodes(missing: dict[tuple[str, int], int]) -> str:
    """Describe node counts: `1 node with 8 free H20`."""
    return " and ".join(
        f"{count} node{'s' if count > 1 else ''} with {cards} free {chip}" for (chip, cards), count in missing.items()
    )
