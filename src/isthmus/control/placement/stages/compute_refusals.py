"""Refusals of the compute search: missing nodes of each cluster, and of all clusters together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isthmus.control.placement.resources.free_resources import model_of
from isthmus.control.placement.resources.requirement import Requirement
from isthmus.control.placement.stages.cluster_room import Room
from isthmus.core.job import Placement
from isthmus.core.plan import Refusal


def never(chips: Iterable[str], num_cards: int, switches: Placement) -> Refusal | None:
    """Return the refusal if the constraints exclude these chips everywhere, otherwise None."""
    models = sorted({model_of(chip) for chip in chips})
    reason = ""
    if len(models) > 1 and not switches.mixed_chips:
        reason = f"the pipelines are for {', '.join(models)}, but placement.mixed_chips is false"
    others = [model for model in models if switches.chips and model not in switches.chips]
    if others:
        reason = f"the pipelines are for {', '.join(others)}, which placement.chips does not name"
    if switches.max_chips and num_cards > switches.max_chips:
        reason = f"{num_cards} chips exceed placement.max_chips, {switches.max_chips}"
    return Refusal(clusters=(), stage="compute", reason=f"compute: {reason}") if reason else None


def compute_refusals(
    requirement: Requirement, rooms: Sequence[Room], groups: Sequence[Sequence[Room]], *, whole: bool
) -> list[Refusal]:
    """Return a refusal for all clusters together, and one for each that cannot hold the complete job.

    `whole`: the search was exhaustive.
    """
    if not rooms:
        return [
            Refusal(clusters=(), stage="compute", reason="compute: the job's placement admits no cluster")
        ]
    every = requirement.counts(0, requirement.num_stages)
    found = []
    for room in sorted(rooms, key=lambda one: one.name):
        lacking = room.lacking_nodes(every)
        if lacking:
            found.append(
                Refusal(
                    clusters=(room.name,),
                    stage="compute",
                    owner=room.site.owner,
                    lacking_nodes=sum(lacking.values()),
                    reason=f"compute: {room.name} ({room.site.owner}) lacks {_nodes(lacking)}",
                )
            )
    return [*_together(requirement, rooms, groups, whole=whole), *found]


def _together(
    requirement: Requirement, rooms: Sequence[Room], groups: Sequence[Sequence[Room]], *, whole: bool
) -> list[Refusal]:
    """Return why all clusters together do not suffice or must not be combined."""
    names = tuple(sorted(room.name for room in rooms))
    lacking = _lacking_together(requirement, rooms)
    if lacking:
        reason = f"compute: all clusters together lack {_nodes(lacking)}"
        total = sum(lacking.values())
        return [Refusal(clusters=names, stage="compute", lacking_nodes=total, reason=reason)]
    if len(groups) > 1 and all(_lacking_together(requirement, group) for group in groups):
        reason = (
            "compute: no single owner has enough nodes; set placement.several_owners: true to combine owners"
        )
        return [Refusal(clusters=names, stage="compute", reason=reason)]
    readers = [room for room in rooms if room.reads_data and any(room.most)]
    if not readers:
        reason = (
            "compute: no cluster with free chips may read the training data "
            "(placement.data_owners, data_regions)"
        )
        return [Refusal(clusters=names, stage="compute", reason=reason)]
    reason = "compute: no cluster holds all stages, and "
    reason += (
        "no split over several clusters is admitted"
        if whole
        else "the search for a split over several clusters ran out of its budget"
    )
    return [Refusal(clusters=names, stage="compute", reason=reason)]


def _lacking_together(requirement: Requirement, rooms: Sequence[Room]) -> dict[tuple[str, int], int]:
    """Return the nodes still missing when every cluster takes as many stages as it holds."""
    wanted = requirement.counts(0, requirement.num_stages)
    found: dict[tuple[str, int], int] = {}
    for i, (chip, cards) in enumerate(requirement.sizes):
        stages = wanted[i] - sum(room.most[i] for room in rooms)
        if stages > 0:
            node = max(s.cards_per_node for s in requirement.stages if s.chip == chip)
            nodes = -(-stages * requirement.pipelines // max(1, node // cards))
            found[chip, node] = max(nodes, found.get((chip, node), 0))
    return found


def _nodes(lacking: dict[tuple[str, int], int]) -> str:
    """Describe node counts: `1 node with 8 free H20`."""
    return " and ".join(
        f"{count} node{'s' if count > 1 else ''} with {cards} free {chip}"
        for (chip, cards), count in lacking.items()
    )
