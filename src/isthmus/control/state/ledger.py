"""The ledger: chips, storage and WAN bandwidth that exist, that are promised, and that a plan lacks.

A resource is named by a key: `CLUSTER/GROUP` for chips, `CLUSTER:storage` for bytes, `FROM>TO` for kbit/s of
a link in that direction. Whatever a job needs is promised in one step or not at all, so nobody ever waits
while holding, and two jobs cannot wait for each other. A job without `placement.network` takes links as they
come: it is promised no bandwidth.
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
"""What a site says of a part whose chips it no longer reports free."""

_KBPS = 1e6
"""kbit/s in a Gbit/s."""


def give_plan(state: State, job: JobRecord, plan: Plan | None) -> None:
    """Let `plan` be the job's, and work out what it needs."""
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
    """Return the chips among what a plan needs, by `CLUSTER/GROUP`."""
    return {key: amount for key, amount in needs.items() if "/" in key}


def free_of(state: State, key: str) -> int:
    """Return what could be promised of a resource now; nothing at a cluster that is not connected."""
    if ">" in key:
        link = state.links.get(key)
        return _kbps(link.bandwidth_gbps) - state.on_links.get(key, 0) if link else 0
    cluster, _, group = key.partition("/")
    record = state.clusters.get(cluster if group else cluster.partition(":")[0])
    if record is None or not record.connected:
        return 0
    return record.free_of(group) if group else record.free_bytes()


def fits(state: State, needs: Mapping[str, int], kept: Mapping[str, int]) -> bool:
    """Tell whether all that is needed is free beside what is `kept` for others."""
    return all(free_of(state, key) - kept.get(key, 0) >= amount for key, amount in needs.items())


def holdable(state: State, job: JobRecord) -> bool:
    """Tell whether the pool as it is connected now has all that the job's plan needs, in use or not."""
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
    """Tell whether some chips are lacking that the pool's jobs do not have: an owner's own work has them."""
    for key, amount in chips_of(needs).items():
        cluster, _, group = key.partition("/")
        if amount > free_of(state, key) + state.clusters[cluster].taken.get(group, 0):
            return True
    return False


def shortfall(state: State, plan: Plan, needs: Mapping[str, int]) -> str:
    """Say in words which site or link lacks what for a plan; empty where it fits."""
    return "; ".join(_lacks(state, plan.clusters, needs))


def lacks(state: State, job: JobRecord) -> str:
    """Say in words which site or link lacks what for the job's plan; empty where it has none or it fits."""
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
    """Enter the parts of an attempt, less what they borrow, and the job's links."""
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
    """Take out a part of which its site has nothing left; its chips go to who borrowed them, or are free."""
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
    """Count for `part` from now on the chips that it was to have of `victim`."""
    if not any(one.job == victim.job and one.attempt == victim.attempt for one in part.victims):
        return
    _add(record, part, -1)
    for group, chips in victim.chips.items():
        part.borrowed[group] = max(0, part.borrowed.get(group, 0) - chips)
    _add(record, part, 1)


def hold(record: ClusterRecord, part: PartRecord, seen: ObservedPart | None) -> None:
    """Note whether what the site reports free already lacks the part's chips, given what it says of it."""
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
    """Give back the bandwidth that was promised to the job's attempt."""
    for key, amount in job.on_links.items():
        state.on_links[key] -= amount
        if not state.on_links[key]:
            del state.on_links[key]
        state.indexes.grown = True
    job.on_links = {}


def left_of_pool(state: State) -> tuple[dict[str, int], dict[str, float]]:
    """Return the bytes left by cluster where some are in use, and what links have left in Gbit/s."""
    storage = {
        name: record.free_bytes()
        for name, record in state.clusters.items()
        if record.connected and (record.taken_bytes or record.free_storage_bytes is not None)
    }
    gbps = {key: max(0, free_of(state, key)) / _KBPS for key in state.links}
    return storage, gbps


def whole_pool(state: State) -> FreeChips:
    """Return all chips of the connected clusters, in use or not."""
    return {
        name: {group.name: group.chips for group in record.cluster.node_groups}
        for name, record in state.clusters.items()
        if record.connected
    }


def link_kbps(gbps: float) -> int:
    """Return a link's bandwidth as the ledger counts it."""
    return _kbps(gbps)


def _add(record: ClusterRecord, part: PartRecord, sign: int) -> None:
    record.free_now = None
    for group, chips in part.chips.items():
        own = chips - part.borrowed.get(group, 0)
        _count(record.taken, group, sign * own)
        if not part.held:
            _count(record.unheld, group, sign * (own - part.local.get(group, 0)))
    record.taken_bytes += sign * part.storage_bytes
    if not part.held:
        record.unwritten_bytes += sign * part.storage_bytes


def _count(book: dict[str, int], group: str, amount: int) -> None:
    book[group] = book.get(group, 0) + amount
    if not book[group]:
        del book[group]


def storage_at(plan: Plan, cluster: str) -> int:
    """Return the storage that a plan needs at a cluster, in bytes."""
    return _storage(plan).get(cluster, 0)


def _most_of(state: State, key: str) -> int:
    """Return what there is in all of a link's bandwidth or of a cluster's storage."""
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
    """Return what a plan sends over each link in kbit/s, no more than the link has: both ways at a hop.

    Gradients of replicas at several clusters are counted beside what crosses hops.
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
