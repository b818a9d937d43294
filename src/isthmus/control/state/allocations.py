"""Allocations: total and allocated chips, storage and WAN bandwidth, and the shortages of a plan.

Amounts are by `PoolResource`: chips, bytes of storage, and kbit/s of a link in one direction. A job's resources
are allocated in one step or not at all: without hold-and-wait, jobs cannot deadlock. Bandwidth is allocated
only to jobs with `placement.network`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from isthmus.control.state.job_records import JobRecord, PoolState
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.messages.agent_messages import ObservedPart
from isthmus.core.plan import Plan, PlanPart
from isthmus.core.pool_resource import KBPS_PER_GBPS, PoolResource

HELD_STATES = frozenset({"ready", "prepared", "running", "succeeded", "failed"})
"""Part states in which a site no longer reports the part's chips as free."""

Amounts = dict[PoolResource, int]
"""Amounts by resource: chips, bytes, kbit/s."""


def assign_plan(state: PoolState, job: JobRecord, plan: Plan | None) -> None:
    """Assign `plan` to the job and compute its needs; None removes the plan."""
    job.plan, job.needs, job.plan_parts, job.predicted_run_s = plan, None, (), 0.0
    job.waiting_job, job.fits_inventory_version = None, -1
    _drop_open_preflight(state, job, plan)
    if plan is None:
        return
    if plan.predicted is not None:
        job.predicted_run_s = plan.predicted.iteration_s * job.spec.training.steps
    late = {place.cluster for place in plan.rollouts if place.joins} - {stage.cluster for stage in plan.stages}
    job.plan_parts = tuple(part for part in plan.parts() if part.cluster not in late)
    job.needs = _needs_of_plan(state, job, plan, job.plan_parts)


def _drop_open_preflight(state: PoolState, job: JobRecord, plan: Plan | None) -> None:
    """Drop the unanswered checks of another plan; the chips reserved for it become free."""
    if job.id in state.indexes.checking and job.preflight and (plan is None or plan.id != job.preflight.plan_id):
        job.preflight = None
        state.indexes.capacity_freed = True
        del state.indexes.checking[job.id]


def needs_of_plan(state: PoolState, job: JobRecord, plan: Plan) -> Amounts:
    """Return the amount of each resource that the job would allocate with `plan`."""
    return _needs_of_plan(state, job, plan, plan.parts())


def _needs_of_plan(state: PoolState, job: JobRecord, plan: Plan, parts: Iterable[PlanPart]) -> Amounts:
    """Return the amount of each resource that the job allocates with `plan`, whose parts are `parts`."""
    needs = chip_needs_of(parts)
    for cluster, num_bytes in _storage_by_cluster(plan).items():
        needs[PoolResource.storage(cluster)] = num_bytes
    if job.reserves_network:
        needs |= _kbps_by_link(state, plan)
    return needs


def chip_needs_of(parts: Iterable[PlanPart]) -> Amounts:
    """Return the chips that the parts of a plan need."""
    return {PoolResource.chips(part.cluster, group): chips for part in parts for group, chips in part.chips.items()}


def chip_needs(needs: Mapping[PoolResource, int]) -> Amounts:
    """Return the chip entries of `needs`."""
    return {resource: amount for resource, amount in needs.items() if resource.kind == "chips"}


def free_amount(state: PoolState, resource: PoolResource) -> int:
    """Return the amount of a resource that can be allocated now; 0 at a cluster that takes no parts."""
    kind, cluster, name = resource
    if kind == "link":
        link = state.links.get(resource)
        return _kbps(link.bandwidth_gbps) - state.allocated_kbps.get(resource, 0) if link else 0
    record = state.clusters.get(cluster)
    if record is None or not record.takes_parts:
        return 0
    return record.free_in_group(name) if kind == "chips" else record.free_bytes()


def missing_amounts(state: PoolState, needs: Mapping[PoolResource, int]) -> Amounts:
    """Return what is missing of `needs`, each amount at least 1; reserved amounts count as free."""
    return dict(_missing_amounts(state, needs, {}))


def fits(state: PoolState, needs: Mapping[PoolResource, int], reserved: Mapping[PoolResource, int]) -> bool:
    """Return whether `needs` are free, not counting the amounts `reserved` for others."""
    return next(_missing_amounts(state, needs, reserved), None) is None


def _missing_amounts(
    state: PoolState, needs: Mapping[PoolResource, int], reserved: Mapping[PoolResource, int]
) -> Iterator[tuple[PoolResource, int]]:
    for resource, needed in needs.items():
        missing = needed - free_amount(state, resource) + reserved.get(resource, 0)
        if missing > 0:
            yield resource, missing


def takes_parts(state: PoolState, cluster: str) -> bool:
    """Return whether a cluster has joined the pool, is connected and not cordoned."""
    record = state.clusters.get(cluster)
    return record is not None and record.takes_parts


def has_capacity(state: PoolState, parts: Iterable[PlanPart]) -> bool:
    """Return whether the pool, if idle, has the chips of a plan's parts at clusters that take parts."""
    return all(
        takes_parts(state, part.cluster)
        and all(state.clusters[part.cluster].capacity(group) >= chips for group, chips in part.chips.items())
        for part in parts
    )


def plan_fits(state: PoolState, job: JobRecord, plan: Plan, reserved: Mapping[PoolResource, int]) -> bool:
    """Return whether the job could start with `plan` now, not counting the amounts `reserved` for others."""
    parts = plan.parts()
    needs = _needs_of_plan(state, job, plan, parts)
    return _idle_pool_holds(state, parts, needs) and fits(state, needs, reserved)


def pool_can_hold(state: PoolState, job: JobRecord) -> bool:
    """Return whether the pool, if idle, could hold the job's plan at clusters that take parts."""
    if job.fits_inventory_version == state.indexes.inventory_version:
        return True
    if not _idle_pool_holds(state, job.plan_parts, job.needs or {}):
        return False
    job.fits_inventory_version = state.indexes.inventory_version
    return True


def _idle_pool_holds(state: PoolState, parts: Iterable[PlanPart], needs: Mapping[PoolResource, int]) -> bool:
    others = ((resource, amount) for resource, amount in needs.items() if resource.kind != "chips")
    return has_capacity(state, parts) and all(_total_amount(state, resource) >= amount for resource, amount in others)


def blocked_by_owner_work(state: PoolState, needs: Mapping[PoolResource, int]) -> bool:
    """Return whether some missing chips are held by an owner's own work rather than by pool jobs."""
    return any(
        amount > state.clusters[chips.cluster].allocated_chips.get(chips.name, 0)
        for chips, amount in chip_needs(missing_amounts(state, needs)).items()
    )


def allocate(state: PoolState, parts: Iterable[PartRecord]) -> None:
    """Allocate parts of an attempt, without their borrowed chips."""
    for part in parts:
        record, part.allocated, part.allocated_ms = state.clusters[part.cluster], True, state.meter.now_ms
        seen = record.reported_parts.get((part.job, part.attempt))
        part.held = seen is not None and seen.state in HELD_STATES
        _count_part(record, part, 1)
        _count_use(state, record, part)


def allocate_links(state: PoolState, job: JobRecord) -> None:
    """Allocate the bandwidth of the job's links."""
    for key, amount in (job.needs or {}).items():
        if key.kind == "link":
            job.allocated_kbps[key] = job.allocated_kbps.get(key, 0) + amount
            state.allocated_kbps[key] = state.allocated_kbps.get(key, 0) + amount


def free_part(state: PoolState, part: PartRecord) -> None:
    """Remove a released part; its chips go to the part that borrows them, or become free."""
    record = state.clusters[part.cluster]
    del record.parts[part.job, part.attempt]
    part.cached_order = None
    if not part.allocated:
        return
    _count_part(record, part, -1)
    part.allocated = False
    _count_use(state, record, part)
    state.indexes.capacity_freed = True
    for name in state.indexes.preemptors:
        for other in state.jobs[name].current_parts():
            if other.borrowed and other.cluster == part.cluster and other.allocated:
                _transfer_borrowed(record, other, part)
                _count_use(state, record, other)


def _transfer_borrowed(record: ClusterRecord, part: PartRecord, victim: PartRecord) -> None:
    """Allocate the chips of the released `victim` to the part that borrows them."""
    if not any(one.job == victim.job and one.attempt == victim.attempt for one in part.victims):
        return
    _count_part(record, part, -1)
    for group, chips in victim.chips.items():
        part.borrowed[group] = max(0, part.borrowed.get(group, 0) - chips)
    _count_part(record, part, 1)


def update_held(record: ClusterRecord, part: PartRecord, seen: ObservedPart | None) -> None:
    """Update whether the site's reported free chips already exclude the part, given its observed state."""
    held = seen is not None and seen.state in HELD_STATES
    arrived = held and seen is not None and seen.state != "ready" and bool(part.local_chips)
    if (held == part.held and not arrived) or not part.allocated:
        return
    _count_part(record, part, -1)
    part.held = held
    if arrived:
        part.local_chips = {}
    _count_part(record, part, 1)


def release_links(state: PoolState, job: JobRecord) -> None:
    """Free the bandwidth allocated to the job."""
    for key, amount in job.allocated_kbps.items():
        state.allocated_kbps[key] -= amount
        if not state.allocated_kbps[key]:
            del state.allocated_kbps[key]
        state.indexes.capacity_freed = True
    job.allocated_kbps = {}


def free_storage_and_links(state: PoolState) -> tuple[dict[str, int], dict[str, float]]:
    """Return free bytes by cluster, where some are in use, and free Gbit/s by link (`FROM>TO`)."""
    storage = {
        name: record.free_bytes()
        for name, record in state.clusters.items()
        if record.takes_parts and (record.allocated_bytes or record.free_storage_bytes is not None)
    }
    used = state.allocated_kbps
    gbps = {
        _link_text(resource): max(0, _kbps(link.bandwidth_gbps) - used.get(resource, 0)) / KBPS_PER_GBPS
        for resource, link in state.links.items()
    }
    return storage, gbps


@lru_cache(1 << 12)
def _link_text(link: PoolResource) -> str:
    return str(link)


def total_chips(state: PoolState) -> dict[str, dict[str, int]]:
    """Return all chips of the clusters that take parts, in use or not, by cluster and node group."""
    return {
        name: {group.name: group.num_chips for group in record.cluster.node_groups}
        for name, record in state.clusters.items()
        if record.takes_parts
    }


def copy_free_chips(state: PoolState) -> dict[str, dict[str, int]]:
    """Return a copy, for the caller to change, of the chips that can be allocated now, by cluster and node group."""
    return {name: dict(groups) for name, groups in state.free_chips().items()}


def unreserved_chips(state: PoolState) -> dict[str, dict[str, int]]:
    """Return the chips that can be allocated now and are not reserved for a job, by cluster and node group."""
    chips = copy_free_chips(state)
    for (_, cluster, group), kept in chip_needs(state.indexes.reserved).items():
        if group in chips.get(cluster, {}):
            chips[cluster][group] = max(0, chips[cluster][group] - kept)
    return chips


def link_kbps(gbps: float) -> int:
    """Return a link's bandwidth in kbit/s."""
    return _kbps(gbps)


def _count_part(record: ClusterRecord, part: PartRecord, sign: int) -> None:
    """Add (`sign` 1) a part to the sums of its cluster, or subtract it (-1)."""
    record.cached_free = None
    for group, chips in part.chips.items():
        own = chips - part.borrowed.get(group, 0)
        _add_amount(record.allocated_chips, group, sign * own)
        if not part.held:
            _add_amount(record.unheld_chips, group, sign * (own - part.local_chips.get(group, 0)))
    record.allocated_bytes += sign * part.storage_bytes
    if not part.held:
        record.unwritten_bytes += sign * part.storage_bytes


def _count_use(state: PoolState, record: ClusterRecord, part: PartRecord) -> None:
    """Count the chips that a part holds now, without borrowed ones, as used by its user."""
    num_chips = sum(part.chips.values()) - sum(part.borrowed.values()) if part.allocated else 0
    user, owner = state.jobs[part.job].user, part.used_owner or record.cluster.owner
    if num_chips != part.used_chips:
        state.chip_use.hold((owner, part.cluster, user), num_chips - part.used_chips)
    part.used_chips, part.used_owner = num_chips, owner


def _add_amount(sums: dict[str, int], group: str, amount: int) -> None:
    sums[group] = sums.get(group, 0) + amount
    if not sums[group]:
        del sums[group]


def storage_bytes_at(plan: Plan, cluster: str) -> int:
    """Return the bytes of storage that a plan needs at a cluster."""
    return _storage_by_cluster(plan).get(cluster, 0)


def _total_amount(state: PoolState, resource: PoolResource) -> int:
    """Return the total kbit/s of a link or bytes of a cluster's storage."""
    if resource.kind == "link":
        return _kbps(state.links[resource].bandwidth_gbps) if resource in state.links else 0
    return state.clusters[resource.cluster].cluster.storage_bytes


def _storage_by_cluster(plan: Plan) -> dict[str, int]:
    needed = plan.predicted.storage_bytes if plan.predicted else ()
    found: dict[str, int] = {}
    for stage, num_bytes in zip(plan.stages, needed, strict=False):
        if num_bytes:
            found[stage.cluster] = found.get(stage.cluster, 0) + num_bytes
    return found


def _kbps_by_link(state: PoolState, plan: Plan) -> Amounts:
    """Return the kbit/s that a plan sends over each link, at most the link's bandwidth."""
    return plan.link_kbps({resource: link.bandwidth_gbps for resource, link in state.links.items()})


def _kbps(gbps: float) -> int:
    return math.floor(gbps * KBPS_PER_GBPS)
