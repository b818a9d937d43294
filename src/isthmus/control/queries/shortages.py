"""`shortages`: what is missing of a plan's resources, by site and link, with the words for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isthmus.control.state import allocations
from isthmus.control.state.job_records import PoolState
from isthmus.core.plan import Refusal
from isthmus.core.pool_resource import KBPS_PER_GBPS, PoolResource
from isthmus.core.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A resource of which less is free than needed, or a cluster that is away."""

    resource: PoolResource
    # Chips, bytes or kbit/s.
    needed: int
    free: int
    # Why the cluster offers nothing at all; "" if it takes parts.
    away: str = ""


def shortages(state: PoolState, needs: Mapping[PoolResource, int]) -> Iterator[Shortage]:
    """Yield what is missing of `needs`, in their order; each cluster that is away once."""
    away = set[str]()
    for resource, missing in allocations.missing_amounts(state, needs).items():
        cluster, needed = resource.cluster, needs[resource]
        if resource.kind == "link" or allocations.takes_parts(state, cluster):
            yield Shortage(resource=resource, needed=needed, free=needed - missing)
        elif cluster not in away:
            away.add(cluster)
            yield Shortage(resource=resource, needed=needed, free=0, away=_why_away(state, cluster))


def _why_away(state: PoolState, cluster: str) -> str:
    record = state.clusters.get(cluster)
    if record is None:
        return "has not joined"
    return "is cordoned" if record.connected else "is not connected"


def describe_shortages(state: PoolState, needs: Mapping[PoolResource, int]) -> str:
    """Describe in one line what is missing of `needs`; "" if nothing is."""
    return "; ".join(_describe(one) for one in shortages(state, needs))


def refusals(state: PoolState, needs: Mapping[PoolResource, int]) -> tuple[Refusal, ...]:
    """Return what is missing of `needs` as refusals that name the owners."""
    return tuple(_refusal(state, one) for one in shortages(state, needs))


def _describe(one: Shortage) -> str:
    """Describe a shortage in the words of a job's reason."""
    resource = one.resource
    if one.away:
        return f"{resource.cluster} {one.away}"
    subject = f"the link {resource}" if resource.kind == "link" else resource.cluster
    of_what = " of storage" if resource.kind == "storage" else ""
    return f"{subject} has {_free_of_needed(one, of_what)}"


def _refusal(state: PoolState, one: Shortage) -> Refusal:
    resource, missing, record = one.resource, one.needed - one.free, state.clusters.get(one.resource.cluster)
    owner = record.cluster.owner if record else None
    where = f"{resource.cluster} ({owner})"
    if one.away:
        reason = f"compute: {resource.cluster} {one.away}"
        return Refusal(clusters=(resource.cluster,), stage="compute", owner=owner, reason=reason)
    if resource.kind == "link":
        return Refusal(
            clusters=(resource.cluster, resource.name),
            stage="network",
            owner=owner,
            lacking_gbps=missing / KBPS_PER_GBPS,
            reason=f"network: {resource.cluster} to {resource.name} has {_free_of_needed(one)}",
        )
    if resource.kind == "storage":
        return Refusal(
            clusters=(resource.cluster,),
            stage="storage",
            owner=owner,
            lacking_bytes=missing,
            reason=f"storage: {where} has {_free_of_needed(one)}",
        )
    groups = record.cluster.node_groups if record else ()
    chips_per_node = next((group.chips_per_node for group in groups if group.name == resource.name), 1)
    return Refusal(
        clusters=(resource.cluster,),
        stage="compute",
        owner=owner,
        lacking_nodes=-(-missing // chips_per_node),
        reason=f"compute: {where} has {_free_of_needed(one)}",
    )


def _free_of_needed(one: Shortage, of_what: str = "") -> str:
    """Return the free and the needed amount in their unit."""
    if one.resource.kind == "chips":
        return f"{one.free} {one.resource.name} free of the {one.needed} needed"
    if one.resource.kind == "storage":
        return f"{format_bytes(one.free)}{of_what} left of the {format_bytes(one.needed)} needed"
    free_gbps, needed_gbps = (kbps / KBPS_PER_GBPS for kbps in (one.free, one.needed))
    return f"{free_gbps:.3g} Gbit/s left of the {needed_gbps:.3g} needed"
