"""`lacking`: which sites lack what for a plan now, as refusals that name the site's owner."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.control.records import State
from isthmus.core.plan import Part, Plan, Refusal


def lacking(state: State, plan: Plan) -> tuple[Refusal, ...]:
    """Return a refusal for each site that cannot take its part of `plan` now; none where the plan fits."""
    return tuple(one for part in plan.parts() for one in _at(state, part))


def never_holds(state: State, plan: Plan) -> bool:
    """Tell whether a site of `plan` is away, or has fewer chips in all than its part needs."""
    for part in plan.parts():
        record = state.clusters.get(part.cluster)
        if record is None or not record.connected:
            return True
        chips = {group.name: group.chips for group in record.cluster.node_groups}
        if any(chips.get(group, 0) < number for group, number in part.chips.items()):
            return True
    return False


def _at(state: State, part: Part) -> Iterator[Refusal]:
    record = state.clusters.get(part.cluster)
    if record is None or not record.connected:
        away = "is not connected" if record else "has not joined"
        yield Refusal(
            clusters=(part.cluster,),
            stage="compute",
            owner=record.cluster.owner if record else None,
            reason=f"compute: {part.cluster} {away}",
        )
        return
    free, owner = record.free(), record.cluster.owner
    nodes = {group.name: group.chips_per_node for group in record.cluster.node_groups}
    for group, number in part.chips.items():
        short = number - free.get(group, 0)
        if short > 0:
            yield Refusal(
                clusters=(part.cluster,),
                stage="compute",
                owner=owner,
                lacking_nodes=-(-short // nodes.get(group, short)),
                reason=f"compute: {part.cluster} ({owner}) has {free.get(group, 0)} {group} free of the "
                f"{number} needed",
            )
