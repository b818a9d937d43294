"""`lacking`: the current shortages of a plan by site and link, as refusals that name the owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from isthmus.control.state import ledger
from isthmus.control.state.job_records import State
from isthmus.core.plan import Part, Refusal
from isthmus.core.units import format_bytes

_KBPS = 1e6
"""kbit/s in a Gbit/s."""


def lacking(state: State, parts: Sequence[Part], needs: Mapping[str, int]) -> tuple[Refusal, ...]:
    """Return a refusal for each site or link without enough free resources for a plan.

    Chip needs come from the plan's `parts`, storage and link needs from `needs` (by resource key).
    """
    found = [one for part in parts for one in _compute(state, part)]
    away = {part.cluster for part in parts if not _is_connected(state, part.cluster)}
    for key, amount in needs.items():
        short = amount - ledger.free_of(state, key)
        if short <= 0 or "/" in key or key.partition(":")[0] in away:
            continue
        found.append(_link(state, key, amount, short) if ">" in key else _storage(state, key, amount, short))
    return tuple(found)


def never_holds(state: State, parts: Sequence[Part]) -> bool:
    """Return whether some site of `parts` is disconnected or has fewer chips in total than its part needs."""
    for part in parts:
        if not _is_connected(state, part.cluster):
            return True
        record = state.clusters[part.cluster]
        if any(record.capacity(group) < number for group, number in part.chips.items()):
            return True
    return False


def _is_connected(state: State, cluster: str) -> bool:
    record = state.clusters.get(cluster)
    return record is not None and record.connected


def _compute(state: State, part: Part) -> Iterator[Refusal]:
    record, where = state.clusters.get(part.cluster), (part.cluster,)
    owner = record.cluster.owner if record else None
    if record is None or not record.connected:
        away = "is not connected" if record else "has not joined"
        reason = f"compute: {part.cluster} {away}"
        yield Refusal(clusters=where, stage="compute", owner=owner, reason=reason)
        return
    nodes = {group.name: group.chips_per_node for group in record.cluster.node_groups}
    for group, number in part.chips.items():
        free = record.free_of(group)
        if free < number:
            yield Refusal(
                clusters=where,
                stage="compute",
                owner=owner,
                lacking_nodes=-(-(number - free) // nodes.get(group, 1)),
                reason=f"compute: {part.cluster} ({owner}) has {free} {group} free of the {number} needed",
            )


def _storage(state: State, key: str, amount: int, short: int) -> Refusal:
    name = key.partition(":")[0]
    owner = state.clusters[name].cluster.owner
    return Refusal(
        clusters=(name,),
        stage="storage",
        owner=owner,
        lacking_bytes=short,
        reason=f"storage: {name} ({owner}) has {format_bytes(amount - short)} left of the "
        f"{format_bytes(amount)} needed",
    )


def _link(state: State, key: str, amount: int, short: int) -> Refusal:
    source, _, target = key.partition(">")
    record = state.clusters.get(source)
    return Refusal(
        clusters=(source, target),
        stage="network",
        owner=record.cluster.owner if record else None,
        lacking_gbps=short / _KBPS,
        reason=f"network: {source} to {target} has {(amount - short) / _KBPS:.3g} Gbit/s left of the "
        f"{amount / _KBPS:.3g} needed",
    )
