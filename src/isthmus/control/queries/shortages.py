"""`shortages`: the current shortages of a plan by site and link, as refusals that name the owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from isthmus.control.state import ledger
from isthmus.control.state.job_records import PoolState
from isthmus.core.plan import PlanPart, Refusal
from isthmus.core.units import format_bytes

_KBPS_PER_GBPS = 1e6
"""kbit/s in a Gbit/s."""


def shortages(state: PoolState, parts: Sequence[PlanPart], needs: Mapping[str, int]) -> tuple[Refusal, ...]:
    """Return a refusal for each site or link without enough free resources for a plan.

    Chip needs come from the plan's `parts`, storage and link needs from `needs` (by resource key).
    """
    found = [one for part in parts for one in _chip_shortages(state, part)]
    away = {part.cluster for part in parts if not _is_connected(state, part.cluster)}
    for key, amount in needs.items():
        short = amount - ledger.free_amount(state, key)
        if short <= 0 or "/" in key or key.partition(":")[0] in away:
            continue
        found.append(
            _link_shortage(state, key, amount, short) if ">" in key else _storage_shortage(state, key, amount, short)
        )
    return tuple(found)


def exceeds_pool(state: PoolState, parts: Sequence[PlanPart]) -> bool:
    """Return whether some site of `parts` is disconnected or has fewer chips in total than its part needs."""
    for part in parts:
        if not _is_connected(state, part.cluster):
            return True
        record = state.clusters[part.cluster]
        if any(record.capacity(group) < number for group, number in part.chips.items()):
            return True
    return False


def _is_connected(state: PoolState, cluster: str) -> bool:
    record = state.clusters.get(cluster)
    return record is not None and record.connected


def _chip_shortages(state: PoolState, part: PlanPart) -> Iterator[Refusal]:
    record, where = state.clusters.get(part.cluster), (part.cluster,)
    owner = record.cluster.owner if record else None
    if record is None or not record.connected:
        away = "is not connected" if record else "has not joined"
        reason = f"compute: {part.cluster} {away}"
        yield Refusal(clusters=where, stage="compute", owner=owner, reason=reason)
        return
    nodes = {group.name: group.chips_per_node for group in record.cluster.node_groups}
    for group, number in part.chips.items():
        free = record.free_in_group(group)
        if free < number:
            yield Refusal(
                clusters=where,
                stage="compute",
                owner=owner,
                lacking_nodes=-(-(number - free) // nodes.get(group, 1)),
                reason=f"compute: {part.cluster} ({owner}) has {free} {group} free of the {number} needed",
            )


def _storage_shortage(state: PoolState, key: str, amount: int, short: int) -> Refusal:
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


def _link_shortage(state: PoolState, key: str, amount: int, short: int) -> Refusal:
    source, _, target = key.partition(">")
    record = state.clusters.get(source)
    return Refusal(
        clusters=(source, target),
        stage="network",
        owner=record.cluster.owner if record else None,
        lacking_gbps=short / _KBPS_PER_GBPS,
        reason=f"network: {source} to {target} has {(amount - short) / _KBPS_PER_GBPS:.3g} Gbit/s left of the "
        f"{amount / _KBPS_PER_GBPS:.3g} needed",
    )
