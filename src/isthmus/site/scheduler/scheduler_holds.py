"""Holds of parts at a site whose scheduler owns the devices, and the jobs that it runs for others.

The agent asks its scheduler for every part whose `hold` is set, and releases every hold whose part has none: what is
wanted follows from the parts alone, so a lost reply or a restart loses no hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.site.devices.device_id_allocator import DeviceIdAllocator
from isthmus.site.machine_events import ForeignPart, HoldObserved, InventoryObserved
from isthmus.site.part_lifecycle import move_part, release_part
from isthmus.site.parts import CLAIMING, SitePart, SiteWorker
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


def drop_hold(part: SitePart) -> None:
    """Want no hold any more."""
    part.hold, part.commits, part.held = "", False, ()


def take_held_devices(site: SiteState, part: SitePart) -> None:
    """Give the workers of a part that claims devices those that the scheduler has granted, if it has."""
    if part.hold == "granted":
        for worker, ids in zip(part.workers.values(), part.held, strict=False):
            worker.devices = ids
        site.devices.record_transition(part, part.state, part.state)


def observe_scheduler(site: SiteState, seen: InventoryObserved | HoldObserved) -> None:
    """Apply a look at the site's scheduler, or its answer to a hold."""
    if isinstance(seen, HoldObserved):
        _observe_hold(site, seen)
    else:
        _observe_inventory(site, seen)


def _observe_hold(site: SiteState, seen: HoldObserved) -> None:
    """Record what became of a part's hold; one that ended under a part ends the part."""
    part = site.parts.get(seen.part)
    if part is None or not part.hold or part.num_holds != seen.number:
        return
    if seen.state == "granted":
        if part.hold != "granted":
            part.hold, part.held = "granted", seen.devices
            if part.state in CLAIMING:
                take_held_devices(site, part)
            site.mark_changed(part)
        return
    if seen.state == "waiting":
        if part.state == "evicting" and seen.detail and part.detail != seen.detail:
            part.detail = f"{site.cluster}: {seen.detail}"
            site.mark_changed(part)
        return
    drop_hold(part)
    site.mark_changed(part)
    if part.state in ("ready", "evicting"):
        move_part(site, part, "refused", seen.now_s, f"{site.cluster}: the scheduler ended the hold of its devices")
    elif part.state == "prepared":
        release_part(site, part, seen.now_s, f"{site.cluster}: the scheduler ended the hold of its devices")


def _observe_inventory(site: SiteState, seen: InventoryObserved) -> None:
    """Adopt the devices that there are now, also under running jobs, and the jobs of others on them."""
    if isinstance(site.devices, DeviceIdAllocator) and dict(site.devices.ids) != dict(seen.devices):
        site.devices.set_ids(seen.devices)
        site.num_changes += 1
    here = {job.name: job for job in seen.foreign}
    for part in [part for part in site.parts.values() if part.foreign and part.job not in here]:
        part.withdrawn = True
        release_part(site, part, seen.now_s)
        site.update_indexes(part)
    for job in seen.foreign:
        known = site.parts.get((job.name, 0))
        if known is None:
            _add_foreign(site, job, seen.now_s)
        elif known.foreign and _devices(known) != dict(job.devices):
            _set_devices(known, job.devices)
            site.devices.record_transition(known, known.state, known.state)
            site.mark_changed(known)


def _add_foreign(site: SiteState, job: ForeignPart, now_s: float) -> None:
    part = SitePart(job=job.name, attempt=0, foreign=True, level=job.level, preemptible=job.preemptible)
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
