"""The ledger: total and allocated chips, storage and WAN bandwidth, and the shortages of a plan.

A resource key is `CLUSTER/GROUP` for chips, `CLUSTER:storage` for bytes, and `FROM>TO` for kbit/s of a link
in that direction. A job's resources are allocated in one step or not at all: without hold-and-wait, jobs
cannot deadlock. Bandwidth is allocated only to jobs with `placement.network`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from isthmus.control.state.job_records import FreeChips, JobRecord, State
from isthmus.control.state.site_records import ClusterRecord, PartRecord
from isthmus.core.messages.agent_messages import ObservedPart
from isthmus.core.plan import Plan
from isthmus.core.units import format_bytes

HELD = frozenset({"ready", "prepared", "running", "succeeded", "failed"})
"""Part states in which a site no longer reports the part's chips as free."""

_KBPS = 1e6
"""kbit/s in a Gbit/s."""


def give_plan(state: State, job: JobRecord, plan: Plan | None) -> None:
    """Assign `plan` to the job and compute its needs; None removes the plan."""
    job.plan, job.needs, job.cuts, job.run_s = plan, None, (), 0.0
    job.request, job.holdable_in = None, -1
    if plan is None:
        return
    if plan.predicted is not None:
        job.run_s = plan.predicted.iteration_s * job.wanted.training.steps
    job.cuts = plan.parts()
    job.needs = {f"{cut.cluster}/{group}": chips for cut in job.cuts for group, chips in cut.chips.items()}
    for cluster, num_bytes in _storage(plan).items():
        job.needs[f"{cluster}:storage"] = num_bytes
    if job.network:
        job.needs |= _bandwidth(state, plan)


def chips_of(needs: Mapping[str, int]) -> dict[str, int]:
    """Return the chip entries of `needs`, by `CLUSTER/GROUP`."""
    return {key: amount for key, amount in needs.items() if "/" in key}


def free_of(state: State, key: str) -> int:
    """Return the amount of a resource that can be allocated now; 0 at a disconnected cluster."""
    if ">" in key:
        link = state.links.get(key)
        return _kbps(link.bandwidth_gbps) - state.on_links.get(key, 0) if link else 0
    cluster, _, group = key.partition("/")
    record = state.clusters.get(cluster if group else cluster.partition(":")[0])
    if record is None or not record.connected:
        return 0
    return record.free_of(group) if group else record.free_bytes()


def fits(state: State, needs: Mapping[str, int], kept: Mapping[str, int]) -> bool:
    """Return whether `needs` are free, not counting the amounts `kept` for others."""
    return all(free_of(state, key) - kept.get(key, 0) >= amount for key, amount in needs.items())


def holdable(state: State, job: JobRecord) -> bool:
    """Return whether the connected pool, if idle, could hold the job's plan."""
    if job.holdable_in == state.indexes.inventory:
        return True
    for cut in job.cuts:
        record = state.clusters.get(cut.cluster)
        if record is None or not record.connected:
            return False
        if any(record.capacity(group) < chips for group, chips in cut.chips.items()):
            return False
    if any(_most_of(state, key) < amount for key, amount in (job.needs or {}).items() if "/" not in key):
        return False
    job.holdable_in = state.indexes.inventory
    return True


def waits_for_owner(state: State, needs: Mapping[str, int]) -> bool:
    """Return whether some missing chips are held by an owner's own work rather than by pool jobs."""
    for key, amount in chips_of(needs).items():
        cluster, _, group = key.partition("/")
        if amount > free_of(state, key) + state.clusters[cluster].taken.get(group, 0):
            return True
    return False


def shortfall(state: State, plan: Plan, needs: Mapping[str, int]) -> str:
    """Describe the shortages of a plan by site and link; empty if it fits."""
    return "; ".join(_lacks(state, plan.clusters, needs))


def lacks(state: State, job: JobRecord) -> str:
    """Describe the shortages of the job's plan; empty if it has no plan or the plan fits."""
    return shortfall(state, job.plan, job.needs) if job.plan and job.needs is not None else ""


def _lacks(state: State, clusters: Iterable[str], needs: Mapping[str, int]) -> Iterator[str]:
    away = set()
    for cluster in clusters:
        record = state.clusters.get(cluster)
        if record is None or not record.connected:
            away.add(cluster)
            yield f"{cluster} {'is not connected' if record else 'has not joined'}"
    for key, amount in needs.items():
        free = free_of(state, key)
        if free >= amount or key.partition("/")[0].partition(":")[0] in away:
            continue
        if "/" in key:
            cluster, _, group = key.partition("/")
            yield f"{cluster} has {free} {group} free of the {amount} needed"
        elif ">" in key:
            yield f"the link {key} has {free / _KBPS:.3g} Gbit/s left of the {amount / _KBPS:.3g} needed"
        else:
            cluster = key.partition(":")[0]
            yield f"{cluster} has {format_bytes(free)} of storage left of the {format_bytes(amount)} needed"


def promise(state: State, job: JobRecord, parts: Iterable[PartRecord]) -> None:
    """Allocate the parts of an attempt, without their borrowed chips, and the job's links."""
    for part in parts:
        record, part.promised = state.clusters[part.cluster], True
        seen = record.reported.get((part.job, part.attempt))
        part.held = seen is not None and seen.state in HELD
        _add(record, part, 1)
    for key, amount in (job.needs or {}).items():
        if ">" in key:
            job.on_links[key] = job.on_links.get(key, 0) + amount
            state.on_links[key] = state.on_links.get(key, 0) + amount


def settle(state: State, part: PartRecord) -> None:
    """Remove a released part; its chips go to the part that borrows them, or become free."""
    record = state.clusters[part.cluster]
    del record.parts[part.job, part.attempt]
    part.order = None
    if not part.promised:
        return
    _add(record, part, -1)
    part.promised = False
    state.indexes.grown = True
    for name in state.indexes.claiming:
        for other in state.jobs[name].present():
            if other.borrowed and other.cluster == part.cluster and other.promised:
                _repay(record, other, part)


def _repay(record: ClusterRecord, part: PartRecord, victim: PartRecord) -> None:
    """Allocate the chips of the released `victim` to the part that borrows them."""
    if not any(one.job == victim.job and one.attempt == victim.attempt for one in part.victims):
        return
    _add(record, part, -1)
    for group, chips in victim.chips.items():
        part.borrowed[group] = max(0, part.borrowed.get(group, 0) - chips)
    _add(record, part, 1)


def hold(record: ClusterRecord, part: PartRecord, seen: ObservedPart | None) -> None:
    """Update whether the site's reported free chips already exclude the part, given its observed state."""
    held = seen is not None and seen.state in HELD
    arrived = held and seen is not None and seen.state != "ready" and bool(part.local)
    if (held == part.held and not arrived) or not part.promised:
        return
    _add(record, part, -1)
    part.held = held
    if arrived:
        part.local = {}
    _add(record, part, 1)


def release_links(state: State, job: JobRecord) -> None:
    """Free the bandwidth allocated to the job."""
    for key, amount in job.on_links.items():
        state.on_links[key] -= amount
        if not state.on_links[key]:
            del state.on_links[key]
        state.indexes.grown = True
    job.on_links = {}


def left_of_pool(state: State) -> tuple[dict[str, int], dict[str, float]]:
    """Return free bytes by cluster, where some are in use, and free Gbit/s by link."""
    storage = {
        name: record.free_bytes()
        for name, record in state.clusters.items()
        if record.connected and (record.taken_bytes or record.free_storage_bytes is not None)
    }
    gbps = {key: max(0, free_of(state, key)) / _KBPS for key in state.links}
    return storage, gbps


def whole_pool(state: State) -> FreeChips:
    """Return all chips of the connected clusters, in use or not, by cluster and node group."""
    return {
        name: {group.name: group.chips for group in record.cluster.node_groups}
        for name, record in state.clusters.items()
        if record.connected
    }


def link_kbps(gbps: float) -> int:
    """Return a link's bandwidth in kbit/s."""
    return _kbps(gbps)


def _add(record: ClusterRecord, part: PartRecord, sign: int) -> None:
    """Add (`sign` 1) a part to the sums of its cluster, or subtract it (-1)."""
    record.free_now = None
    for group, chips in part.chips.items():
        own = chips - part.borrowed.get(group, 0)
        _count(record.taken, group, sign * own)
        if not part.held:
            _count(record.unheld, group, sign * (own - part.local.get(group, 0)))
    record.taken_bytes += sign * part.storage_bytes
    if not part.held:
        record.unwritten_bytes += sign * part.storage_bytes


def _count(sums: dict[str, int], group: str, amount: int) -> None:
    sums[group] = sums.get(group, 0) + amount
    if not sums[group]:
        del sums[group]


def storage_at(plan: Plan, cluster: str) -> int:
    """Return the bytes of storage that a plan needs at a cluster."""
    return _storage(plan).get(cluster, 0)


def _most_of(state: State, key: str) -> int:
    """Return the total kbit/s of a link or bytes of a cluster's storage."""
    if ">" in key:
        return _kbps(state.links[key].bandwidth_gbps) if key in state.links else 0
    return state.clusters[key.partition(":")[0]].cluster.storage_bytes


def _storage(plan: Plan) -> dict[str, int]:
    needed = plan.predicted.storage_bytes if plan.predicted else ()
    found: dict[str, int] = {}
    for stage, num_bytes in zip(plan.stages, needed, strict=False):
        if num_bytes:
            found[stage.cluster] = found.get(stage.cluster, 0) + num_bytes
    return found


def _bandwidth(state: State, plan: Plan) -> dict[str, int]:
    """Return the kbit/s that a plan sends over each link, at most the link's bandwidth.

    Counts both directions of every hop, and the gradients of replicas at several clusters.
    """
    gbps = plan.predicted.wan_gbps if plan.predicted else ()
    found: dict[str, int] = {}
    for (one, other), rate in zip(plan.all_hops(), gbps, strict=False):
        for key in (f"{one}>{other}", f"{other}>{one}"):
            if key in state.links and rate:
                found[key] = found.get(key, 0) + math.ceil(rate * _KBPS)
    for key, rate in (plan.predicted.gradient_gbps if plan.predicted else {}).items():
        if key in state.links and rate:
            found[key] = found.get(key, 0) + math.ceil(rate * _KBPS)
    return {key: min(rate, _kbps(state.links[key].bandwidth_gbps)) for key, rate in found.items()}


def _kbps(gbps: float) -> int:
    return math.floor(gbps * _KBPS)
