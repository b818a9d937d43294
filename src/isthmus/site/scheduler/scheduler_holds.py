"""Holds of parts at a site whose scheduler owns the devices, and the jobs that it runs for others.

The agent asks its scheduler for every part whose `hold` is set, and releases every hold whose part has none: what is
wanted follows from the parts alone, so a lost reply or a restart loses no hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.messages.agent_messages import is_closer_to_root_cause
from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine_events import ForeignPart, HoldObserved, InventoryObserved, PathObserved, ProbeObserved
from isthmus.site.part_lifecycle import move_part, release_part
from isthmus.site.parts import CLAIMING, PartKey, SitePart, SiteWorker
from isthmus.site.scheduler.network_paths import observe_path
from isthmus.site.site_state import SiteState


def ask_for_hold(site: SiteState, part: SitePart, *, commits: bool) -> bool:
    """Want a hold of the part's devices, at the cost of others if it `commits`; return whether it is granted."""
    if not site.asks_for_holds:
        return True
    if not part.hold:
        part.hold, part.num_holds = "asked", part.num_holds + 1
        site.mark_changed(part)
    part.commits = part.commits or commits
    return part.hold == "granted"


def ask_for_probe(site: SiteState, part: SitePart) -> bool:
    """Want to know whether the scheduler would preempt the part's victims and no other job; return whether it would."""
    if site.asks_for_probes and not part.probe:
        part.probe = "asked"
        site.mark_changed(part)
    return not site.asks_for_probes or part.probe == "agreed"


def drop_hold(part: SitePart) -> None:
    """Want no hold any more."""
    part.hold, part.commits, part.held, part.granted_at_s, part.probe = "", False, (), None, ""


def victim_name(key: PartKey) -> str:
    """Return what adapters call a victim: a job of others by its name, a part of the pool by job and attempt."""
    job, attempt = key
    return f"{job}/{attempt}" if attempt else job


def take_held_devices(site: SiteState, part: SitePart) -> None:
    """Give the workers of a part that claims devices those that the scheduler has granted, if it has."""
    if part.hold == "granted":
        for worker, ids in zip(part.workers.values(), part.held, strict=False):
            worker.devices = ids
        site.devices.record_transition(part, part.state, part.state)


def observe_scheduler(site: SiteState, seen: InventoryObserved | HoldObserved | ProbeObserved | PathObserved) -> None:
    """Apply a look at the site's scheduler, or its answer to a hold or a probe, or the network's to a path."""
    if isinstance(seen, HoldObserved):
        _observe_hold(site, seen)
    elif isinstance(seen, PathObserved):
        observe_path(site, seen)
    elif isinstance(seen, ProbeObserved):
        _observe_probe(site, seen)
    else:
        _observe_inventory(site, seen)


def _observe_hold(site: SiteState, seen: HoldObserved) -> None:
    """Record what became of a part's hold; one that ended under a part ends the part."""
    part = site.parts.get(seen.part)
    if part is None or not part.hold or part.num_holds != seen.number:
        return
    if seen.state == "granted":
        if part.hold != "granted":
            part.hold, part.held, part.granted_at_s = "granted", seen.devices, seen.granted_at_s
            if part.state in CLAIMING:
                take_held_devices(site, part)
            _explain(site, part, "")
            site.mark_changed(part)
        return
    if seen.state == "waiting":
        if part.state in ("queued", "evicting"):
            _explain(site, part, f"{site.cluster}: {seen.detail}" if seen.detail else "")
        return
    drop_hold(part)
    site.mark_changed(part)
    detail = f"{site.cluster}: the scheduler ended the hold of its devices"
    if part.state in ("ready", "evicting"):
        move_part(site, part, "refused", seen.now_s, detail)
    elif part.state == "prepared":
        release_part(site, part, seen.now_s, detail)
    elif part.unexplained_s is not None and is_closer_to_root_cause("evicted", part.fault):
        part.fault, part.detail = "evicted", f"{detail}; {part.detail}"


def _explain(site: SiteState, part: SitePart, text: str) -> None:
    """Say what the part's hold waits for; "" takes back what was said before."""
    if text == part.hold_detail:
        return
    if text or part.detail == part.hold_detail:
        part.detail = text
        site.mark_changed(part)
    part.hold_detail = text


def _observe_probe(site: SiteState, seen: ProbeObserved) -> None:
    """Refuse a part for which the scheduler would preempt jobs that the pool has not chosen."""
    part = site.parts.get(seen.part)
    if part is None or part.probe != "asked" or part.victims != seen.victims:
        return
    others = sorted(set(seen.preempted) - {victim_name(key) for key in part.victims})
    if not others:
        part.probe = "agreed"
        site.mark_changed(part)
        return
    drop_hold(part)
    part.set_workers({})
    detail = f"{site.cluster}: its scheduler would preempt {', '.join(others)}, which the order does not name"
    move_part(site, part, "refused", seen.now_s, detail)


def _observe_inventory(site: SiteState, seen: InventoryObserved) -> None:
    """Adopt the devices that there are now, also under running jobs, and the jobs of others on them."""
    if isinstance(site.devices, DeviceIdAllocator) and dict(site.devices.ids) != dict(seen.devices):
        site.devices.set_ids(seen.devices)
        site.num_changes += 1
    site.knows_inventory = True
    here = {job.name: job for job in seen.foreign}
    for part in [part for part in site.parts.values() if part.foreign and part.job not in here]:
        part.withdrawn = True
        release_part(site, part, seen.now_s)
        site.update_indexes(part)
    for job in seen.foreign:
        known = site.parts.get((job.name, 0))
        if known is None:
            _add_foreign(site, job, seen.now_s)
        elif known.foreign:
            known.ends_at_s = job.ends_at_s
            if _devices(known) != dict(job.devices):
                _set_devices(known, job.devices)
                site.devices.record_transition(known, known.state, known.state)
                site.mark_changed(known)


def _add_foreign(site: SiteState, job: ForeignPart, now_s: float) -> None:
    part = SitePart(job=job.name, attempt=0, foreign=True, level=job.level, preemptible=job.preemptible)
    part.ends_at_s = job.ends_at_s
    _set_devices(part, job.devices)
    site.add(part)
    move_part(site, part, "running", now_s)


def _set_devices(part: SitePart, devices: Mapping[str, tuple[str, ...]]) -> None:
    part.set_workers({
        number: SiteWorker(node_group=group, chips=len(ids), devices=ids)
        for number, (group, ids) in enumerate(devices.items())
    })  # fmt: skip


def _devices(part: SitePart) -> dict[str, tuple[str, ...]]:
    return {worker.node_group: worker.devices for worker in part.workers.values()}
